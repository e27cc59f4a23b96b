"""The image store of a node: images pulled once, verified, and mounted without being unpacked.

A layer is kept as its tar. An image has one index over its layers' tars, a file system that the kernel mounts with the
tars as its devices: nothing is unpacked, and a layer is there once, however many images have it. Everything here
blocks; from a coroutine, call it in a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.exports import exported

if TYPE_CHECKING:
    from agentenv.store.intake import StoreLimits
    from agentenv.store.manifest import StoredImage
    from agentenv.store.registry import RegistrySettings
    from agentenv.store.store import Store
    from agentenv.store.tree import TreeLimits

__all__ = ["RegistrySettings", "Store", "StoreLimits", "StoredImage", "TreeLimits"]

_HOMES = {
    "RegistrySettings": "agentenv.store.registry",
    "Store": "agentenv.store.store",
    "StoreLimits": "agentenv.store.intake",
    "StoredImage": "agentenv.store.manifest",
    "TreeLimits": "agentenv.store.tree",
}
if not TYPE_CHECKING:  # a type checker would take any name for one of the package's
    __getattr__, __dir__ = exported(__name__, _HOMES)
