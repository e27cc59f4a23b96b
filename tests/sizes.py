"""Sizes at which something may change: round every constant of the sources that counts bytes, and round the sizes whose
base64, UTF-8 or JSON is as large as that constant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src" / "agentenv"
LARGEST_BYTES = 2 * 1024 * 1024
"""Larger constants are left out: a test that moves 64 MiB for each of them takes minutes."""
EXPANSIONS = ((1, 1), (3, 4), (1, 2), (1, 3), (1, 4), (1, 6))
"""Sizes as fractions of what they become: as they are; base64; two, three and four bytes of UTF-8 a character (JSON's
``\\n`` takes two as well); JSON's ``\\u0001``."""

_C_NUMBER = re.compile(r"\b[A-Z][A-Z_]+ = ((?:\d+ \* )*\d{2,})\b")


@cache
def byte_constants() -> tuple[int, ...]:
    """Every number from 1 KiB to LARGEST_BYTES of a Python constant with BYTES, CHARS or SIZE in its name, or of a C
    constant."""
    found: set[int] = set()
    for path in SOURCES.rglob("*.py"):
        found.update(_of_python(ast.parse(path.read_text())))
    for path in SOURCES.rglob("*.[ch]"):
        for expression in _C_NUMBER.findall(path.read_text()):
            found.add(_product(expression))
    return tuple(sorted(number for number in found if 1024 <= number <= LARGEST_BYTES))


def around(constant: int, *, steps: Iterable[int] = (-2, -1, 0, 1, 2)) -> tuple[int, ...]:
    """The sizes at which content reaches or passes ``constant``, in one of its encodings."""
    sizes = {constant * part // whole + step for part, whole in EXPANSIONS for step in steps}
    return tuple(sorted(size for size in sizes if size >= 0))


def contents(size: int) -> Iterator[bytes]:
    """Contents of about this size in characters, each growing in another way on its way: bytes that are no text, ASCII,
    characters of two, three and four bytes, and control characters."""
    yield bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    for character in ("x", "é", "\u4e16", "\U0001f600", "\x01"):
        yield (character * size).encode()


def _of_python(tree: ast.Module) -> Iterator[int]:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(re.search("BYTES|CHARS|SIZE", name) for name in names):
            number = _number(node.value)
            if number is not None:
                yield number


def _number(node: ast.expr | None) -> int | None:
    """The value of a product or power of plain numbers."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
        left, right = _number(node.left), _number(node.right)
        if left is not None and right is not None:
            return left * right if isinstance(node.op, ast.Mult) else int(left**right)
    return None


def _product(expression: str) -> int:
    product = 1
    for factor in expression.split(" * "):
        product *= int(factor)
    return product
