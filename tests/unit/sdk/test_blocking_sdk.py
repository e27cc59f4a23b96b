"""sdk/sandbox.py is what scripts/blocking_sdk.py makes of the async classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from agentenv.sdk.blocking import Blocking
from agentenv.sdk.sandbox import Process
from scripts import blocking_sdk
from scripts.blocking_sdk import Twin, Writer


def test_the_module_is_current() -> None:
    assert blocking_sdk.module() == blocking_sdk.MODULE.read_text(), "run: python scripts/blocking_sdk.py"


def test_a_stale_module_fails_the_check_and_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current = blocking_sdk.MODULE.read_text()
    stale = tmp_path / "sandbox.py"
    stale.write_text(current.replace("def seal", "def unseal"))
    monkeypatch.setattr(blocking_sdk, "MODULE", stale)
    monkeypatch.setattr(blocking_sdk, "module", lambda: current)  # as the test above finds it
    assert blocking_sdk.main(["check"]) == 1
    assert "make format" in capsys.readouterr().err
    assert "def unseal" in stale.read_text()
    assert blocking_sdk.main([]) == 0
    assert stale.read_text() == current
    assert blocking_sdk.main(["check"]) == 0


class Base:
    async def inherited(self, given: bytes) -> bytes:
        """What a base has."""
        return given

    async def hidden(self) -> int:
        """Not this one."""
        raise NotImplementedError


class Asynchronous(Base):
    def __init__(self, name: str) -> None:
        self.name: str = name
        """A documented attribute."""
        self._private: str = name
        """A private one."""

    async def hidden(self, *, twice: bool = False) -> int:
        """For ``async with``."""
        return 2 if twice else 1

    @asynccontextmanager
    async def held(self, port: int) -> AsyncIterator[str]:
        """Held."""
        yield str(port)

    async def items(self) -> AsyncIterator[bytes]:
        """Several."""
        for item in (b"one", b"", b"two"):
            yield item

    def plain(self, given: str = "x") -> str:
        """Not awaited."""
        return given

    def only(self) -> object:
        """Of use only to a coroutine."""
        return self


BLOCKING = '''\
class Plain(Blocking[Asynchronous]):
    """None."""
    @property
    def name(self) -> str:
        """A documented attribute."""
        return self._driven.name
    def hidden(self, *, twice: bool=False) -> int:
        """For ``with``."""
        return self._loop.run(self._driven.hidden(twice=twice))
    @contextmanager
    def held(self, port: int) -> Iterator[str]:
        """Held."""
        with self._loop.held(self._driven.held(port)) as held:
            yield held
    def items(self) -> Iterator[bytes]:
        """Several."""
        yield from self._loop.iterate(self._driven.items())
    def plain(self, given: str='x') -> str:
        """Not awaited."""
        return self._driven.plain(given)
    def inherited(self, given: bytes) -> bytes:
        """What a base has."""
        return self._loop.run(self._driven.inherited(given))'''


def written(kind: type, **more: Any) -> str:
    twin = Twin("Plain", kind, Blocking, "None.", **more)
    return Writer(twin, (twin,)).text()


def test_each_kind_of_method_has_a_twin() -> None:
    assert written(Asynchronous, async_only=frozenset({"only"})) == BLOCKING
    assert "def only" in written(Asynchronous)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(function)(lambda *given: function(*given))


class Decorated:
    def __init__(self) -> None: ...

    @decorated
    def other(self) -> None:
        """Decorated."""


class Awaited:
    def __init__(self) -> None: ...

    async def awaited(self) -> None:
        """Then ``await`` it."""


class NotAnnotated:
    def __init__(self) -> None:
        self.count = 0
        """Without a type."""


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Decorated, "other.*decorated"), (Awaited, "awaited.*'await'"), (NotAnnotated, "self.count = 0: annotate it")],
)
def test_what_cannot_be_translated_is_refused(kind: type, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        written(kind)


def test_a_method_of_the_base_is_not_generated() -> None:
    class Has(Blocking[Asynchronous]):
        def plain(self) -> str:
            return "by hand"

    twin = Twin("Plain", Asynchronous, Has)
    assert "def plain" not in Writer(twin, (twin,)).text()


def test_an_editor_shows_what_it_shows_of_the_async_method() -> None:
    assert "Raises SessionBusyError" in (Process.write.__doc__ or "")
