"""The image of a farm's containers: built here, from Python, with nothing but a Docker engine.

Everything here blocks; from a coroutine, call it in a thread.
"""

from __future__ import annotations

from agentenv.image.engine import connect
from agentenv.image.ensure import IMAGE, LABEL_CONTENT, ImageStatus, build_image, ensure_image, image_status
from agentenv.image.progress import Report, Step, silent

__all__ = [
    "IMAGE",
    "LABEL_CONTENT",
    "ImageStatus",
    "Report",
    "Step",
    "build_image",
    "connect",
    "ensure_image",
    "image_status",
    "silent",
]
