"""Samples of the plain HTTP shape of a farm service."""

from __future__ import annotations

from agentenv.wire import plain
from agentenv.wire.base import WireModel
from agentenv.wire.calls import CallResult
from tests.golden.farm_samples import LOAD, RUN

_RESULT = CallResult(id="c-1", exit_code=3, stdout="é\n", duration_s=0.5)
_TOOL = plain.PlainTool(name="bash", arguments={"command": "echo é"}, uniq_id="u-1")
_ENTRY = plain.ArtifactEntry(path="a/b", is_dir=False, size=2, mtime=1.5)
_HELD = plain.PlainTrajectory(
    run="team/exp7", trajectory_id="t1", state="lost", lease="c/3/7", running_calls=1, idle_s=2.5, error="e"
)

PLAIN_MODELS: tuple[WireModel, ...] = (
    plain.OfTrajectory(trajectory_id="t1", run="team/exp7"),
    _TOOL,
    plain.ExecuteRequest(
        trajectory_id="t1",
        run="team/exp7",
        tool=_TOOL,
        timeout_s=30.0,
        call_id="c-1",
        lease="c/3/7",
        kind="eval",
        image="debian:trixie",
        root={"memory_bytes": 2**29, "network": {"kind": "allow", "hosts": ["example.org"]}},
    ),
    plain.ExecuteReply.of(_RESULT, "c/3/7", "u-1"),
    plain.ReleaseRequest(trajectory_id="t1", run="team/exp7", reset_workspace=False),
    plain.ReleaseDone(released=True),
    plain.ArtifactReadRequest(
        trajectory_id="t1", run="r", path="a", encoding="base64", offset=1, max_bytes=2, include_sha256=True
    ),
    plain.ArtifactReply(success=False, error="e"),
    plain.ArtifactRead(
        success=True,
        path="a",
        content="é",
        bytes=2,
        file_size=3,
        truncated=True,
        lossy=True,
        sha256="00" * 32,
    ),
    plain.ArtifactListRequest(trajectory_id="t1", run="r", path="a", recursive=True, max_entries=5),
    _ENTRY,
    plain.ArtifactList(success=True, entries=(_ENTRY,), truncated=True),
    plain.ArtifactArchiveRequest(trajectory_id="t1", run="r", path="a", format="tgz", max_bytes=2, max_entries=3),
    plain.ArtifactArchive(success=True, content="aA==", format="tgz", bytes=1, entry_count=2, sha256="00" * 32),
    _HELD,
    plain.PlainStatus(queue_size=1, total_requests=2, total_errors=3, pool=LOAD, runs=(RUN,), trajectories=(_HELD,)),
)
