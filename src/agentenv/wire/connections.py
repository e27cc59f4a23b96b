"""Connections to servers in a slot, and from a slot to its client, each over a WebSocket with the lease's key in the
header :data:`agentenv.wire.transfers.LEASE_HEADER`.

``GET /v1/slots/{slot}/connect?port=N``: one connection to a server in the slot. The first message, a text, is a
:class:`ConnectionReply`: whether something listens at that port of the slot's loopback interface. From then on binary
messages carry the bytes of both directions, in pieces of any length up to :data:`agentenv.wire.base.MAX_PIECE_BYTES`;
the text :data:`OVER` means that its sender will send no more, as a half-closed socket does. A connection ends when
either side closes it; one whose lease has ended, with another :class:`ConnectionReply` before that.

``GET /v1/slots/{slot}/listen?port=N`` (0: any free one): a port of the slot's loopback interface whose connections the
client answers, as many as :data:`MAX_CONNECTIONS` at once. The messages are the same; the first says whether the port
can be listened on, and the bytes are frames, which the server does not read: those of ``slotlisten``, which runs in
the slot. A frame is two little-endian u32, the connection and ``kind << 24 | bytes``, and of DATA so many bytes more:

========  ====================  ===================================================================
PORT      from the slot, first  the connection is the port; no bytes
OPEN      from the slot         a connection was made; they are numbered from 1, each one higher
DATA      both ways             1 to :data:`MAX_DATA_BYTES` of its bytes
OVER      both ways             its sender sends no more DATA
RESET     both ways             it was broken off; nothing more is sent for it
ROOM      both ways             so many bytes were taken: as many more may be sent
========  ====================  ===================================================================

Each side may send :data:`WINDOW_BYTES` for a connection before the first ROOM. Room is given once at least
:data:`ROOM_BYTES` were taken: most requests and answers need no frame for it. A connection has ended when both sides
sent OVER and took everything, or one sent RESET; frames for one that has ended are ignored. Whoever breaks these rules
is not heard any further.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from agentenv.wire.base import WireModel

MAX_CONNECTIONS: Final = 64
"""Maximum number of WebSockets to connections and ports open at once for one slot, and of connections to one port that
its client answers."""
WINDOW_BYTES: Final = 128 * 1024
ROOM_BYTES: Final = WINDOW_BYTES // 4
MAX_DATA_BYTES: Final = 32 * 1024
OVER: Final = "over"
LINGER_S: Final = 2.0
"""Time for data sent before the end of a connection to be read."""


class FrameKind(IntEnum):
    """What a frame of a port is."""

    PORT = 1
    OPEN = 2
    DATA = 3
    OVER = 4
    RESET = 5
    ROOM = 6


class ConnectionReply(WireModel):
    """``error``: the errno with which it could not be made; 0: it was made. ``lost``: why the slot was lost; empty: it
    was not."""

    error: int = 0
    lost: str = ""
