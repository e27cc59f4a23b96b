"""The wire format, pinned: one JSON sample per model. A change here is a change of the protocol
(``PROTOCOL_VERSION``), or it adds an optional field: then its sample grows.

``python -m tests.golden.test_wire_samples`` writes the samples anew, for reading the difference.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import agentenv.wire
from agentenv.errors import StaleLeaseError
from agentenv.sandbox.server.calls import encode_result, refusal
from agentenv.wire import (
    calls,
    connections,
    image_config,
    leases,
    programs,
    server,
    sessions,
    slot_metrics,
    tails,
    tools,
    toolserver,
    transfers,
    watch,
)
from agentenv.wire.base import KeptModel, WireModel
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec, ServiceSpec
from agentenv.wire.states import SlotState
from tests.golden.farm_samples import FARM_MODELS
from tests.golden.image_samples import IMAGE_MODELS
from tests.golden.plain_samples import PLAIN_MODELS

SAMPLES = Path(__file__).parent / "wire"

_KEY = leases.LeaseKey(slot=3, epoch=7, secret="0123456789abcdef0123456789abcdef")
_CALL = calls.Call(
    id="c-1",
    lease=_KEY,
    tool="bash",
    arguments={"command": "echo é"},
    timeout_s=30.0,
    boot="0011223344556677",
    attachments=(calls.Attachment(field="stdin", size_bytes=300_000),),
)
_CALL_KEY = calls.CallKey(id="c-1", lease=_KEY)
_ATTACHMENT = calls.Attachment(field="content.text", size_bytes=300_000)
_RESULT = calls.CallResult(
    id="c-1",
    fault="infra",
    error="lease_lost",
    message="slot 3: the slot was lost",
    exit_code=137,
    stdout="é\n",
    stderr="\ufffd\u0000",
    stdout_dropped_bytes=5,
    stderr_dropped_bytes=6,
    timed_out=True,
    oom_killed=True,
    truncated=True,
    cancelled=True,
    duration_s=1.5,
    queue_s=0.25,
    cpu_s=0.5,
    peak_memory_bytes=4096,
    content={"size_bytes": 1},
    attachments=(_ATTACHMENT,),
)
_ROOT = RootSpec(
    image="sha256:" + 64 * "0",
    writable="disk",
    writable_bytes=2**30,
    writable_inodes=1000,
    memory_bytes=2**29,
    cpu_millis=1500,
    processes=100,
    user="agent:staff",
    workdir="/srv",
    env={"NAME": "é"},
    network=NetworkPolicy("public"),
    capabilities=("net_raw",),
    nested_namespaces=True,
    services=(ServiceSpec("db", "sha256:" + 64 * "1", user="db", env={"A": "b"}, volumes={"/data": "kept:ro"}),),
    volumes={"/data": "kept"},
    hosts=("api.internal",),
)
_TOKEN = leases.TokenTag(id="0f1e", cap=8)
_TAGS = leases.Tags(run="r", environment="repair", kind="eval", group="g", item="é", tokens=(_TOKEN,))
_REPORT = leases.SlotReport(
    slot=3,
    state=SlotState.leased,
    epoch=7,
    trajectory="t",
    tags=_TAGS,
    expires_in_s=12.5,
    running_calls=2,
    in_state_s=61.5,
)
_LOST = leases.LostLease(
    slot=3, epoch=6, run="r", trajectory="t", error="lease_lost", message="not renewed", lost_s=1.5
)
_PATCHED = tools.PatchedFile(path="b", action="renamed", old_path="a", hunks=2, fuzz=1, offset_lines=3)
_MATCH = tools.SearchMatch(path="a", line=3, text="é", cut=True, lossy=True)
_FILE = tools.FileEntry(path="a/b", kind="file", size_bytes=2, mode=0o644, modified_s=1.5)

_SCOPE = toolserver.CallScope(trajectory="t-0", group="t", item="item")
_TOOL = toolserver.ToolDescription(
    name="web_search", description="Search.", parameters={"type": "object"}, timeout_s=60.0, unavailable="no provider"
)

_PROCESS = sessions.ProcessState(
    process="p1",
    command="make",
    state="exited",
    exit_code=2,
    pty=True,
    runs_s=2.5,
    total_bytes=300_000,
    dropped_bytes=100_000,
    unread_bytes=5,
)
_TMUX = sessions.TmuxState(
    session="main",
    state="exited",
    exit_code=2,
    idle=True,
    command="vi",
    rows=40,
    columns=120,
    cursor_row=1,
    cursor_column=2,
    history_lines=3,
)

_PAUSED = leases.PausedSlot(
    trajectory="build",
    tags=leases.Tags(run="exp7", environment="named", kind="interactive", item="0c0c0c0c0c0c0c0c/600.0/plain/pause"),
    checkpoint="0c" * 16,
    root=RootSpec("", "0c" * 16),
    paused_s=2.5,
    resumed=True,
)

MODELS: tuple[WireModel, ...] = (
    _KEY,
    _CALL,
    _RESULT,
    _REPORT,
    _FILE,
    calls.Batch(batch=2, calls=(_CALL,)),
    leases.EndRequest(slot=3, epoch=7, error="lease_reclaimed", message="m"),
    _CALL_KEY,
    _ATTACHMENT,
    calls.LiveOutput(stdout=b"one\n", stdout_from=5, stderr=b"\xff", stderr_from=6, ended=True),
    calls.Cancel(calls=(_CALL_KEY,)),
    calls.Forget(calls=(_CALL_KEY,)),
    calls.Accepted(batch=2),
    calls.Result(result=_RESULT),
    calls.Failure(error="protocol", message="calls.0.id: Field required", batch=2),
    _TAGS,
    _TOKEN,
    leases.LeaseRequest(slot=3, trajectory="t", ttl_s=60.0, request_id="r" * 16, tags=_TAGS, root=_ROOT),
    leases.LeaseGrant(key=_KEY, trajectory="t", ttl_s=60.0),
    leases.RenewRequest(keys=(_KEY,), ttl_s=60.0),
    leases.SealSlot(),
    leases.CheckpointSlot(),
    leases.RestoreSlot(checkpoint="0c" * 16),
    leases.DropCheckpoint(checkpoint="0c" * 16),
    leases.ChangeNetwork(network=NetworkPolicy("allow", ("*.example.org:443",))),
    leases.PauseSlot(),
    leases.PauseWhenIdle(),
    _PAUSED,
    server.PausedReply(paused=(_PAUSED,)),
    leases.ActionRequest(key=_KEY, action=leases.RestoreSlot(checkpoint="0c" * 16), request_id="q" * 16),
    leases.ActionReply(slot=3, state=SlotState.leased, checkpoint="0c" * 16),
    leases.LeaseLoss(slot=4, error="slot_destroyed", message="slot 4 was destroyed"),
    leases.RenewReply(
        renewed=(3,),
        stale=(4,),
        lost=(leases.LeaseLoss(slot=4, error="slot_destroyed", message="slot 4 was destroyed"),),
    ),
    leases.ReleaseReply(slot=3, state=SlotState.free),
    server.Health(status="ok", version="0.1.0", supervisor_silent_s=1.5, leader_url="http://leader:8700"),
    server.Proof(name="uid", holds=True, required=True, detail="20003", cure=""),
    server.ServerInfo(
        container="c",
        boot="0011223344556677",
        version="0.1.0",
        slots=10,
        isolation="full",
        weaker=("w",),
        proofs=(server.Proof(name="uid", holds=True, required=True),),
        allow_network=False,
        image_format="erofs",
        image_weaker=("i",),
    ),
    _LOST,
    server.SlotsReply(boot="0011223344556677", slots=(_REPORT,), lost=(_LOST,), heard_s=1.25),
    watch.WatchList(boot="0011223344556677", generation=4, slots=(_REPORT,)),
    watch.WatchChange(slot=_REPORT),
    server.ErrorReply(error="stale_lease", message="m", next_step="n", fault="infra", retry_after_s=1.5),
    watch.CallTimes(counts=(1, 2), total_s=0.5),
    watch.WatchBeat(
        statistics={"calls_running": 2},
        supervisor_silent_s=1.5,
        draining=True,
        call_times=watch.CallTimes(counts=(1, 2), total_s=0.5),
    ),
    tails.TailCall(call=2, tool="bash", about="echo é", ago_s=1.5),
    tails.TailOutput(call=2, stream="stderr", text="é\n", skipped_bytes=3),
    tails.TailEnd(call=2, exit_code=137, duration_s=1.5, note="timed out"),
    tails.TailBeat(),
    tails.TailOver(),
    tools.BashArguments(command="true", cwd="sub", env={"A": "b"}, stdin="in"),
    tools.BashReply(data=b"\xff", parts=(0, 0, 1, 0)),
    connections.ConnectionReply(error=111, lost="the slot was lost"),
    programs.ProgramOrder(command="cat é", argv=("cat", "é"), workdir="sub", env={"A": "b"}, user="app", timeout_s=1.5),
    programs.ProgramStarted(pid=12),
    programs.ProgramRefused(error="stale_lease", message="m", next_step="n"),
    programs.InputTaken(bytes=4096, closed=True),
    programs.StreamOver(stream="stderr"),
    programs.ProgramEnded(exit_code=137, timed_out=True, oom_killed=True),
    programs.ProgramLost(error="slot_destroyed", message="the slot was lost"),
    programs.StreamRoom(stream="stdout", bytes=4096),
    programs.EndOfInput(),
    programs.SendSignal(signal="TERM"),
    tools.ReadFileArguments(path="a", offset=1, limit=2, binary=True),
    tools.ReadFileReply(text="é", size_bytes=2, mode=0o644, truncated=True, next_offset=3, lossy=True),
    tools.WriteFileArguments(path="a", data=b"\0\xff", mode=0o755),
    tools.WriteFileReply(size_bytes=2, created=True),
    tools.ListFilesArguments(path="a", depth=2, limit=3, hidden=False),
    tools.ListFilesReply(entries=(_FILE,), truncated=True),
    tools.ArtifactsArguments(action="extract", path="a", data=b"\0\xff"),
    tools.ArtifactFile(path="a", size_bytes=1, sha256="0" * 64),
    tools.ArtifactsReply(
        data=b"\0\xff", files=(tools.ArtifactFile(path="a", size_bytes=1, sha256="0" * 64),), total_bytes=1
    ),
    _PATCHED,
    _MATCH,
    image_config.ImageConfig(user="app", workdir="/w", env={"A": "b"}, entrypoint=("sh", "-c"), cmd=("id",)),
    slot_metrics.SlotMetrics(
        memory_bytes=4096,
        memory_peak_bytes=8192,
        memory_limit_bytes=2**31,
        cpu_s=1.5,
        processes=3,
        processes_limit=400,
        storage_bytes=512,
        storage_limit_bytes=2**30,
    ),
    tools.PathsArguments(
        user="app", action="rename", path="a", target="b", follow=False, parents=True, exist_ok=True, recursive=True
    ),
    tools.PathsReply(entry=_FILE),
    tools.PatchArguments(patch="--- a\n", path="sub", strip=1, fuzz=0),
    tools.PatchReply(files=(_PATCHED,)),
    tools.SearchArguments(pattern="x", path="sub", glob="*.py", ignore_case=True, literal=True, limit=3),
    tools.SearchReply(
        matches=(_MATCH,),
        truncated=True,
        files_searched=4,
        binary_skipped=3,
        large_skipped=2,
        unreadable_skipped=1,
    ),
    _SCOPE,
    _TOOL,
    toolserver.ToolList(boot="0011223344556677", version="0.1.0", tools=(_TOOL,)),
    toolserver.ToolCallRequest(
        id="c-1",
        scope=_SCOPE,
        tool="web_search",
        arguments={"query": "é"},
        timeout_s=30.0,
        boot="0011223344556677",
        state_boot="0011223344556677",
        forget=("c-0",),
        wait_s=20.0,
    ),
    toolserver.ToolCallReply(boot="0011223344556677", result=_RESULT, stateful=True),
    toolserver.CancelCalls(trajectory="t-0", ids=("c-1",)),
    toolserver.EndTrajectory(trajectory="t-0"),
    toolserver.Done(),
    sessions.TerminalArguments(
        session="s", keys=("C-c",), input="é", pty=True, timeout_s=1.5, workdir="sub", env={"A": "b"}
    ),
    _PROCESS,
    sessions.TerminalReply(
        session="s",
        state="running",
        cwd="/workspace",
        pty=True,
        command="make",
        running_s=2.5,
        started=True,
        waiting_for_input=True,
        process=_PROCESS,
        note="n",
        notices=("p1 ended",),
    ),
    sessions.ProcessArguments(action="start", command="make", workdir="sub", pty=True, check_interval=30),
    sessions.ProcessReply(
        process=_PROCESS,
        processes=(_PROCESS,),
        offset=1,
        next_offset=2,
        truncated=True,
        written_bytes=3,
        waited_s=0.5,
        clamped_to_s=60.0,
        note="n",
        notices=("p1 ended",),
    ),
    sessions.TmuxArguments(action="send_keys", session="main", text="é", keys=("Up",), block=True, max_wait_s=5.0),
    _TMUX,
    sessions.TmuxReply(
        session=_TMUX,
        sessions=(_TMUX,),
        sent_bytes=2,
        matched=True,
        waited_s=0.5,
        note="n",
        recording='[0.5, "o", "x"]',
    ),
    *FARM_MODELS,
    *PLAIN_MODELS,
    *IMAGE_MODELS,
    transfers.TransferReply(exit_code=28, stderr="a: No space left\n", path="a", entries=2, total_bytes=3),
)


def _sample(model: WireModel) -> Path:
    return SAMPLES / f"{type(model).__name__}.json"


def _named(model: WireModel) -> str:
    return type(model).__name__


@pytest.mark.parametrize("model", MODELS, ids=_named)
def test_a_model_is_written_as_its_sample_and_read_back(model: WireModel) -> None:
    sample = json.loads(_sample(model).read_text())
    assert json.loads(model.model_dump_json()) == sample
    assert type(model).model_validate_json(json.dumps(sample)) == model


@pytest.mark.parametrize("model", MODELS, ids=_named)
def test_a_field_nobody_knows_is_refused(model: WireModel) -> None:
    sample = json.loads(_sample(model).read_text())
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        type(model).model_validate({**sample, "nonsense": 1})


def test_every_model_of_the_wire_has_a_sample() -> None:
    bases = {KeptModel, tools.FileToolArguments}
    for module in pkgutil.iter_modules(agentenv.wire.__path__):
        importlib.import_module(f"agentenv.wire.{module.name}")
    known = {kind for kind in _subclasses(WireModel) - bases if kind.__module__.startswith("agentenv.wire.")}
    assert known == {type(model) for model in MODELS}
    assert {path.stem for path in SAMPLES.iterdir()} == {kind.__name__ for kind in known} | {"sent_results"}


def _subclasses(kind: type[WireModel]) -> set[type[WireModel]]:
    direct = set(kind.__subclasses__())
    return direct.union(*(_subclasses(each) for each in direct))


def _sent() -> list[str]:
    """Results exactly as the server writes them: without what is at its default."""
    quick = {"id": "c-1", "exit_code": 0, "stdout": "hi\n", "duration_s": 0.001, "cpu_s": 0.002}
    return [
        encode_result(quick).decode(),
        encode_result({"id": "c-2", "exit_code": 0}, b'{"size_bytes":1}').decode(),
        encode_result(refusal("c-3", StaleLeaseError("gone"))).decode(),
    ]


def test_results_are_sent_exactly_so() -> None:
    assert _sent() == json.loads((SAMPLES / "sent_results.json").read_text())
    messages = [calls.server_message.validate_json(text) for text in _sent()]
    assert [message.result.id for message in messages if isinstance(message, calls.Result)] == ["c-1", "c-2", "c-3"]


def _write() -> None:
    SAMPLES.mkdir(exist_ok=True)
    for model in MODELS:
        text = json.dumps(json.loads(model.model_dump_json()), indent=1)
        _sample(model).write_text(text + "\n")
    (SAMPLES / "sent_results.json").write_text(json.dumps(_sent(), indent=1) + "\n")


if __name__ == "__main__":
    _write()
