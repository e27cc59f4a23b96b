"""Reserved words of bash that begin, divide or end compound commands, or change how the following text is parsed."""

from __future__ import annotations

RESERVED_WORDS = frozenset({
    "if", "then", "elif", "else", "fi", "case", "esac", "for", "select", "while", "until", "do", "done", "in",
    "function", "time", "coproc", "{", "}", "!", "[[", "]]", "alias", "unalias", "shopt",
})  # fmt: skip
