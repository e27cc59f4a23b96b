"""The plain HTTP shape of a farm service: tools are called by trajectory, and the farm leases, keeps and releases the
slots itself. For programs in any language; every request is one JSON object, and so is every reply.

A failure of the farm or its containers is never a reply of these: it has a status of 5xx (429 for too much at once) and
an :class:`agentenv.wire.server.ErrorReply`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from agentenv.errors import ConfigError
from agentenv.wire.base import MAX_TIMEOUT_S, Arguments, CallId, Count, TrajectoryName, WireModel
from agentenv.wire.calls import CallResult
from agentenv.wire.farm import FarmLoad, LeaseId, RunName, RunStatus
from agentenv.wire.leases import RunKind
from agentenv.wire.roots import RootSpec
from agentenv.wire.tools import PathArgument

ARTIFACT_BYTES: Final = 1024 * 1024
MAX_ARTIFACT_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of one file, or of one compressed archive, in a reply."""
LISTED: Final = 2_000
MAX_LISTED: Final = 100_000

_ANY_IMAGE: Final = "sha256:" + 64 * "0"
_NAMED_APART: Final = ("image", "checkpoint")
"""Fields of a RootSpec that a request does not give as options."""


def _options(raw: Any) -> RootSpec:
    """Raises ConfigError, which is not a ValueError: the client gets it unchanged."""
    if isinstance(raw, RootSpec):
        return raw
    for name in _NAMED_APART:
        if isinstance(raw, dict) and name in raw:
            raise ConfigError(f"root.{name}", "is not an option of a root", next_step="name the image beside it")
    return RootSpec.parse({**raw, "image": _ANY_IMAGE} if isinstance(raw, dict) else raw)


RootOptions = Annotated[
    RootSpec,
    PlainValidator(_options),
    PlainSerializer(lambda root: {name: value for name, value in root.to_dict().items() if name not in _NAMED_APART}),
    WithJsonSchema(
        {"type": "object", "description": "The fields of agentenv.wire.roots.RootSpec but image and checkpoint."}
    ),
]
"""A root whose image is named by a reference beside it."""

ArtifactBytes = Annotated[int, Field(ge=1, le=MAX_ARTIFACT_BYTES)]


class OfTrajectory(WireModel):
    """What every request names. ``run``: which, if the token is for several."""

    trajectory_id: TrajectoryName
    run: RunName = ""


class PlainTool(WireModel):
    """A tool and its arguments, as a model calls it. ``uniq_id`` is repeated in the reply."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: Arguments = Field(default_factory=dict)
    uniq_id: CallId | None = None


class ExecuteRequest(OfTrajectory):
    """``POST /execute``. The first call of a trajectory leases its slot; later ones go to the same."""

    tool: PlainTool
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Bounds the run in the slot; waiting for the slot, and behind earlier calls, does not count. None: the tool's
    default."""
    call_id: CallId | None = None
    """Makes the call repeatable: sent again with the same id, it returns the result it has, or will have, and never
    runs twice. Unique within the trajectory."""
    lease: LeaseId | None = None
    """The ``lease`` of an earlier reply: the call is refused (``stale_lease``) unless the trajectory still has it."""
    kind: RunKind = "train"
    """What a slot that this call leases is for."""
    image: Annotated[str, Field(max_length=1_000, pattern=r"^[^\s\x00-\x1f]*$")] = ""
    """What a slot that this call leases is made from: a reference, as in ``POST /v1/images``, or a digest. A later call
    names none, or the same with the same ``root``; with another the call is refused. Empty: a plain slot."""
    root: RootOptions | None = None
    """More about that slot: its limits, its network, its user. Needs ``image``."""

    @model_validator(mode="after")
    def _root_has_an_image(self) -> Self:
        if self.root is not None and not self.image:
            raise ValueError("root needs an image")
        return self

    def root_of(self, digest: str) -> RootSpec:
        """The root that is asked for, when its image has this digest."""
        return RootSpec(digest) if self.root is None else replace(self.root, image=digest)

    @property
    def asked(self) -> str:
        """The same for calls that ask for the same root; empty: for none."""
        if not self.image:
            return ""
        words = json.dumps([self.image, self.root_of(_ANY_IMAGE).to_dict()], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:16]


class ExecuteReply(WireModel):
    """The outcome of a call. ``success``: the tool did its work, and a command ended in time with exit code 0.
    ``output``: what it printed, or its answer. ``error``: what was wrong, for the model; a command that failed is data,
    with its exit code in ``metadata``, which is the whole result."""

    success: bool
    output: str
    error: str = ""
    metadata: CallResult
    uniq_id: CallId | None = None
    lease: LeaseId
    """The slot it ran in: another one has another workspace."""

    @classmethod
    def of(cls, result: CallResult, lease: str, uniq_id: str | None) -> ExecuteReply:
        """The reply of a result."""
        error = result.message or (_why_failed(result) if not result.success else "")
        return cls(
            success=result.success, output=result.output, error=error, metadata=result, uniq_id=uniq_id, lease=lease
        )


def _why_failed(result: CallResult) -> str:
    if result.timed_out:
        return f"timed out after {result.duration_s:.1f} s"
    return "cancelled" if result.cancelled else f"exit code {result.exit_code}"


class ReleaseRequest(OfTrajectory):
    """``POST /release``. May be repeated. ``reset_workspace`` is accepted for programs that send it: whatever its
    value, a slot is reset before its next lease."""

    reset_workspace: bool = True


class ReleaseDone(WireModel):
    """The answer to ``POST /release``. ``released``: whether the trajectory had a slot, or waited for one."""

    status: Literal["ok"] = "ok"
    released: bool


class ArtifactReadRequest(OfTrajectory):
    """``POST /artifacts/read``: at most ``max_bytes`` of one file (None: 1 MiB). ``include_sha256``: of the bytes
    returned."""

    path: PathArgument
    encoding: Literal["text", "base64"] = "text"
    offset: Count = 0
    max_bytes: ArtifactBytes | None = None
    include_sha256: bool = False


class ArtifactReply(WireModel):
    """What the replies about artifacts have in common. ``success`` is false when the files are the cause: there is no
    such path, say; ``error`` then has the reason."""

    success: bool
    error: str = ""


class ArtifactRead(ArtifactReply):
    """The answer. ``truncated``: the file continues after the ``bytes`` returned. Text that is not UTF-8 is returned
    with replacement characters, and ``lossy``."""

    path: str = ""
    content: str = ""
    encoding: Literal["text", "base64"] = "text"
    bytes: int = 0
    file_size: int | None = None
    truncated: bool = False
    lossy: bool = False
    sha256: str | None = None


class ArtifactListRequest(OfTrajectory):
    """``POST /artifacts/list``: a directory, or with ``recursive`` all below it (64 levels); at most ``max_entries``
    (None: 2,000)."""

    path: PathArgument = "."
    recursive: bool = False
    max_entries: Annotated[int, Field(ge=1, le=MAX_LISTED)] | None = None


class ArtifactEntry(WireModel):
    """One entry; ``mtime`` in seconds since 1970."""

    path: str
    is_dir: bool
    size: int
    mtime: float


class ArtifactList(ArtifactReply):
    """The answer, in order of path."""

    entries: tuple[ArtifactEntry, ...] = ()
    truncated: bool = False


class ArtifactArchiveRequest(OfTrajectory):
    """``POST /artifacts/archive``: a file or directory, packed. ``max_bytes`` bounds the compressed archive (None: 16
    MiB), ``max_entries`` its files: a larger one is refused, not cut."""

    path: PathArgument = "."
    format: Literal["tar.gz", "tgz"] = "tar.gz"
    max_bytes: ArtifactBytes | None = None
    max_entries: Annotated[int, Field(ge=1, le=MAX_LISTED)] | None = None


class ArtifactArchive(ArtifactReply):
    """The answer: ``content`` is a tar.gz in base64, ``bytes`` and ``sha256`` are the archive's, ``entry_count`` its
    files'."""

    content: str = ""
    encoding: Literal["base64"] = "base64"
    format: Literal["tar.gz", "tgz"] = "tar.gz"
    bytes: int = 0
    entry_count: int = 0
    sha256: str | None = None


class PlainTrajectory(WireModel):
    """One trajectory in ``GET /status``. ``state``: ``waiting`` for a slot, ``held``, or ``lost``: its calls are
    refused with ``error`` until it is released."""

    run: str
    trajectory_id: str
    state: Literal["waiting", "held", "lost"]
    lease: LeaseId | None = None
    running_calls: int = 0
    idle_s: float = 0.0
    error: str = ""


class PlainStatus(WireModel):
    """``GET /status``: the farm's slots, who waits, and the runs and trajectories that the token covers.

    ``queue_size``: waiting requests of all runs. ``total_requests`` and ``total_errors``: calls, and those that failed
    by our fault, of these runs since this farm process started."""

    queue_size: int
    total_requests: int
    total_errors: int
    pool: FarmLoad
    runs: tuple[RunStatus, ...]
    trajectories: tuple[PlainTrajectory, ...]
