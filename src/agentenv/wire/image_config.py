"""How the image of a slot configures its programs: the reply of ``GET /v1/slots/{slot}/image``."""

from __future__ import annotations

from pydantic import Field

from agentenv.wire.base import WireModel


class ImageConfig(WireModel):
    """What programs of the slot are started with if a call names nothing else, and the image's own command.

    ``user`` (empty: root), ``workdir`` and ``env`` are the image's, where the lease has not replaced them or added to
    them. ``entrypoint`` and ``cmd`` are the image's: the command is both together."""

    user: str = ""
    workdir: str = "/"
    env: dict[str, str] = Field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
