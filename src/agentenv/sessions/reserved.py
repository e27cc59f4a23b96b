"""Words that begin, divide or end the compound commands of bash, or change how what follows is parsed."""

from __future__ import annotations

RESERVED_WORDS = frozenset({
    "if", "then", "elif", "else", "fi", "case", "esac", "for", "select", "while", "until", "do", "done", "in",
    "function", "time", "coproc", "{", "}", "!", "[[", "]]", "alias", "unalias", "shopt",
})  # fmt: skip
