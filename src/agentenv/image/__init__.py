"""The image of a farm's containers: built here by Python with only a Docker engine.

Everything here blocks; from a coroutine, call it in a thread. Code that uses an engine is imported at first use: it
needs the docker SDK (``agentenv[farm]``), the rest does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from agentenv.image.context import IMAGE, LABEL_CONTENT
from agentenv.image.progress import BuildStep, Report, silent

if TYPE_CHECKING:
    from agentenv.image.engine import connect
    from agentenv.image.ensure import ImageStatus, build_image, ensure_image, image_status
    from agentenv.image.machine import make_machine

__all__ = [
    "IMAGE",
    "LABEL_CONTENT",
    "BuildStep",
    "ImageStatus",
    "Report",
    "build_image",
    "connect",
    "ensure_image",
    "image_status",
    "make_machine",
    "silent",
]

_HOMES: Final = {
    "ImageStatus": "agentenv.image.ensure",
    "build_image": "agentenv.image.ensure",
    "connect": "agentenv.image.engine",
    "ensure_image": "agentenv.image.ensure",
    "image_status": "agentenv.image.ensure",
    "make_machine": "agentenv.image.machine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
