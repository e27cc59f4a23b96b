"""Injects bugs by small changes to the syntax tree, written back as small changes to the text.

Pure: text in, mutations out. Only the changed segment of the source is replaced, so a repaired file is byte for
byte the original one, and a diff shows one or two words.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "*", "/": "*"}
TOKENS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.Is: "is",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Div: "/",
    ast.And: "and",
    ast.Or: "or",
}


@dataclass(frozen=True, order=True)
class Mutation:
    """Replace bytes ``start:end`` (which read ``before``) of a UTF-8 source by ``after``.

    ``kind`` says what sort of bug it is, ``function`` the qualified name it is in, ``line`` counts from 1.
    """

    start: int
    end: int
    before: str
    after: str
    kind: str
    function: str
    line: int


class StaleMutationError(ValueError):
    """The source is not the one that the mutation was made from."""


def apply(source: str, mutations: Iterable[Mutation]) -> str:
    """``source`` with the mutations in it.

    Raises:
        StaleMutationError: the text at a mutation's place is not what it replaces, or two overlap.
    """
    raw = source.encode()
    last_start = len(raw) + 1
    for mutation in sorted(mutations, reverse=True):
        if mutation.end > last_start or raw[mutation.start : mutation.end] != mutation.before.encode():
            raise StaleMutationError(
                f"line {mutation.line} does not read {mutation.before!r}, or two mutations overlap"
            )
        raw = raw[: mutation.start] + mutation.after.encode() + raw[mutation.end :]
        last_start = mutation.start
    return raw.decode()


def diff(path: str, before: str, after: str) -> str:
    """A unified diff with ``a/`` and ``b/`` names, fit for ``patch -p1``."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=2
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def candidates(source: str, seed: int | str) -> Iterator[Mutation]:
    """Every mutation of the functions in ``source``, in an order that depends on ``seed`` only.

    The kinds of bug alternate, so that the first few already include all of them. Each result still compiles.
    Docstrings, annotations, decorators, default values, f-strings and raised messages are left unchanged: they do
    not affect anything a test checks.
    """
    by_kind: dict[str, list[Mutation]] = {}
    found = sorted(set(_Finder(source).mutations()))
    random.Random(f"{seed}").shuffle(found)
    for mutation in found:
        by_kind.setdefault(mutation.kind, []).append(mutation)
    for round_of_kinds in itertools.zip_longest(*(by_kind[kind] for kind in sorted(by_kind))):
        yield from (mutation for mutation in round_of_kinds if mutation and _compiles(apply(source, [mutation])))


def _compiles(source: str) -> bool:
    try:
        compile(source, "<mutated>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    """Walks one source and yields its mutations."""

    def __init__(self, source: str) -> None:
        self._raw = source.encode()
        self._tree = ast.parse(source)
        self._line_starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def mutations(self) -> Iterator[Mutation]:
        for name, function in _functions(self._tree):
            for node in _body_nodes(function):
                for start, end, after, kind in self._changes(node):
                    before = self._raw[start:end].decode()
                    yield Mutation(start, end, before, after, kind, name, node.lineno)

    def _at(self, line: int, column: int) -> int:
        return self._line_starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end = self._at(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
        return self._at(node.lineno, node.col_offset), end

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._raw[start:end].decode()

    def _changes(self, node: ast.expr | ast.stmt) -> Iterator[tuple[int, int, str, str]]:
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in TOKENS:
                token = TOKENS[type(operator)]
                yield from self._between(node.left, node.comparators[0], token, COMPARISONS[token], "comparison")
            case ast.BoolOp():
                token = TOKENS[type(node.op)]
                swapped = {"and": "or", "or": "and"}[token]
                yield from self._between(node.values[0], node.values[1], token, swapped, "boolean")
            case ast.BinOp() if type(node.op) in TOKENS and not _textual(node):
                token = TOKENS[type(node.op)]
                yield from self._between(node.left, node.right, token, ARITHMETIC[token], "operator")
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start, _ = self._span(node)
                yield start, self._span(node.operand)[0], "", "dropped negation"
            case ast.Constant() | ast.Call() | ast.Return():
                yield from self._replaced(node)

    def _replaced(self, node: ast.Constant | ast.Call | ast.Return) -> Iterator[tuple[int, int, str, str]]:
        start, end = self._span(node)
        match node:
            case ast.Constant(value=bool() as truth):
                yield start, end, str(not truth), "flipped constant"
            case ast.Constant(value=int() as number) if abs(number) < 1_000:
                yield start, end, str(number + 1), "off by one"
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield start, self._span(value)[0], "", "dropped return"
            case ast.Call(args=[first, second, *_], keywords=[]) if self._swappable(first, second):
                gap = self._raw[self._span(first)[1] : self._span(second)[0]].decode()
                swapped = f"{self._text(second)}{gap}{self._text(first)}"
                yield self._span(first)[0], self._span(second)[1], swapped, "swapped arguments"

    def _swappable(self, first: ast.expr, second: ast.expr) -> bool:
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        return not starred and self._text(first) != self._text(second)

    def _between(
        self, left: ast.expr, right: ast.expr, token: str, after: str, kind: str
    ) -> Iterator[tuple[int, int, str, str]]:
        """The operator between two operands; nothing when a comment makes its place ambiguous."""
        begin, end = self._span(left)[1], self._span(right)[0]
        gap = self._raw[begin:end].decode()
        word = rf"\b{token}\b" if token.isalpha() else re.escape(token)
        places = list(re.finditer(word, gap))
        if len(places) == 1 and "#" not in gap:
            start = begin + len(gap[: places[0].start()].encode())
            yield start, start + len(token), after, kind


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                stack.append((f"{name}.", child))
                if not isinstance(child, ast.ClassDef) and child.name not in ("__repr__", "__str__", "__hash__"):
                    yield name, child
            else:
                stack.append((prefix, child))


def _body_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr | ast.stmt]:
    """The nodes of a function's own statements: not of functions inside it, nor of what is left alone."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(
            node, ast.JoinedStr | ast.Raise | ast.Assert | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        stack.extend(child for field, child in _children(node) if field not in ("annotation", "decorator_list"))


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield field, item


def _textual(node: ast.BinOp) -> bool:
    """Whether an operand is a string literal: ``%`` and ``+`` then build text, and break loudly."""
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )
