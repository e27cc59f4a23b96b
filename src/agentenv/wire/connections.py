"""Connections to servers in a slot: ``GET /v1/slots/{slot}/connect?port=N``, a WebSocket, with the lease's key in the
header :data:`agentenv.wire.transfers.LEASE_HEADER`.

The first message, a text, is a :class:`ConnectionReply`: whether something listens at that port of the slot's loopback
interface. From then on binary messages carry the bytes of both directions, in pieces of any length up to
:data:`agentenv.wire.base.MAX_PIECE_BYTES`; the text :data:`OVER` means that its sender will send no more, as a
half-closed socket does. A connection ends when either side closes it; one whose lease has ended, with another
:class:`ConnectionReply` before that.
"""

from __future__ import annotations

from typing import Final

from agentenv.wire.base import WireModel

MAX_CONNECTIONS: Final = 64
"""Maximum number of connections open at once in one slot."""
OVER: Final = "over"
LINGER_S: Final = 2.0
"""Time for data sent before the end of a connection to be read."""


class ConnectionReply(WireModel):
    """``error``: the errno with which it could not be made; 0: it was made. ``lost``: why the slot was lost; empty: it
    was not."""

    error: int = 0
    lost: str = ""
