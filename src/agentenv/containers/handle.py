"""The address of one container."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ContainerHandle:
    """Address of one running sandbox server. ``index`` orders containers for packing; ``node`` names the machine whose
    image store it sees, empty where there is none."""

    id: str
    index: int
    base_url: str
    token: str = field(repr=False)
    slots: int
    node: str = ""
