"""Public names of a package, imported at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from agentenv.errors import missing_extra


def exported(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, for names by the modules that define them.

    So importing the package stays cheap, and only a name whose module needs an extra needs that extra: without it the
    name raises MissingExtraError, an ImportError.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            raise missing_extra(name, error) or error from None
        setattr(sys.modules[package], name, value)  # the next look-up does not come here
        return value

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, names
