"""One call of an external tool: checked, counted, answered from a cassette or run, redacted, logged."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from agentenv.api.tool_server.audit import AuditLog
from agentenv.api.tool_server.cassette import Cassette, Recording, file_name, key_of
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, ToolRun
from agentenv.errors import AgentEnvError, InfraError, PolicyRefusalError, ToolCallError, from_wire
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import CallScope, ToolCallRequest

logger = logging.getLogger(__name__)

_MOST_OWNERS: Final = 20_000
"""Trajectories, and groups, whose calls are counted; the least recently used one is forgotten first."""
_MOST_CASSETTES: Final = 1_000


@dataclass
class TrajectoryState:
    """State of a trajectory's stateful tools: ``chain`` identifies everything they did so far; ``skipped`` are the
    calls answered by a cassette, which must be made before the next real one."""

    stateful: bool = False
    chain: str = ""
    skipped: list[tuple[ExternalTool, BaseModel, Recording]] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class _Prepared:
    """A call with valid arguments. ``asked`` are the arguments as JSON, with defaults, without secrets."""

    request: ToolCallRequest
    tool: ExternalTool
    arguments: BaseModel
    asked: dict[str, Any]
    state: TrajectoryState
    source: str = "live"
    queue_s: float = 0.0
    began_at: float = 0.0


class ExternalCallRunner:
    """Runs calls; never raises except for cancellation, and results hold no secret's value."""

    def __init__(
        self,
        tools: Mapping[str, ExternalTool],
        catalog: ToolCatalog,
        settings: ToolServerSettings,
        secrets: Secrets,
        audit: AuditLog,
    ) -> None:
        self.budgets = Budgets()
        self._tools = tools
        self._catalog = catalog
        self._settings = settings
        self._secrets = secrets
        self._audit = audit
        self._places = {name: asyncio.Semaphore(tool.concurrent) for name, tool in tools.items()}
        self._cassettes: OrderedDict[str, Cassette] = OrderedDict()
        self._loading = asyncio.Lock()

    async def run(self, request: ToolCallRequest, state: TrajectoryState) -> CallResult:
        """The result of the call. Cancelling this cancels it."""
        redactor = self._secrets.redactor
        asked: Any = redactor.value(request.arguments)
        source = "refused"
        try:
            call = self._prepared(request, state)
            asked = call.asked
            self._spend(call)
            source, result = "live", await self._settled(call)
            source = call.source
        except (ToolCallError, PolicyRefusalError) as error:
            result = CallResult.refused(request.id, error)
        except asyncio.CancelledError:
            self._audit.add(request, asked, CallResult(id=request.id, cancelled=True), source)
            raise
        clean = _redacted(result, redactor)
        self._audit.add(request, asked, clean, source)
        return clean

    def _prepared(self, request: ToolCallRequest, state: TrajectoryState) -> _Prepared:
        checked = self._catalog.validate(request.tool, request.arguments)
        tool = self._tools[request.tool]
        arguments = tool.spec.arguments.model_validate(checked)
        asked = self._secrets.redactor.value(arguments.model_dump(mode="json"))
        return _Prepared(request, tool, arguments, asked, state)

    def _spend(self, call: _Prepared) -> None:
        tool = call.tool
        limits = {"per_trajectory": tool.per_trajectory, "per_group": tool.per_group}
        refusal = self.budgets.spend(call.request.scope, tool.name, **limits)
        if refusal is not None:
            raise PolicyRefusalError(refusal)

    async def _settled(self, call: _Prepared) -> CallResult:
        """The result, whatever the tool did; a failure on our side is refunded to the budget."""
        try:
            if not call.tool.stateful:
                return await self._answered(call)
            async with call.state.turn:
                call.state.stateful = True
                return await self._answered(call)
        except InfraError as error:
            self.budgets.refund(call.request.scope, call.tool.name)
            return CallResult.refused(call.request.id, error)

    # -- cassettes ---------------------------------------------------------------------------------

    async def _answered(self, call: _Prepared) -> CallResult:
        mode = self._settings.cassettes.mode
        if mode == "off" or not call.tool.recorded:
            return (await self._live(call))[0]
        after = call.state.chain if call.tool.stateful else ""
        key = key_of(call.tool.name, call.asked, after)
        cassette = await self._cassette(call.request.scope.item or call.request.scope.group)
        made: list[CallResult] = []

        async def ask() -> Recording | None:
            try:
                result, keep = await self._live(call)
            except (ToolCallError, PolicyRefusalError) as error:
                refused = self._recording(call, key, after, CallResult.refused(call.request.id, error))
                await cassette.keep_refusal(refused)
                raise
            made.append(result)
            return self._recording(call, key, after, result) if keep else None

        if mode == "replay":
            recording = cassette.known(key)
            if recording is None:
                raise _not_replayed(call.tool.name, cassette.refusal(key))
        else:
            recording = await cassette.answer(key, ask)
        if call.tool.stateful:
            call.state.chain = key if recording is not None else key_of("not kept", {}, key)
            if not made and recording is not None:
                call.state.skipped.append((call.tool, call.arguments, recording))
        if made:
            return made[0]
        assert recording is not None  # no request was made, so it was known
        call.source = "cassette"
        return CallResult(
            id=call.request.id,
            exit_code=recording.exit_code,
            stderr=recording.stderr,
            content=recording.content,
            truncated=recording.truncated,
        )

    def _recording(self, call: _Prepared, key: str, after: str, result: CallResult) -> Recording:
        clean = _redacted(result, self._secrets.redactor)
        return Recording(
            key=key,
            tool=call.tool.name,
            arguments=call.asked,
            after=after,
            exit_code=clean.exit_code or 0,
            stderr=clean.stderr,
            content=clean.content,
            truncated=clean.truncated,
            error=clean.error or "",
            message=clean.message or "",
        )

    async def _cassette(self, item: str) -> Cassette:
        directory = self._settings.cassettes.directory
        assert directory is not None  # the settings require it
        async with self._loading:
            found = self._cassettes.get(item)
            if found is None:
                found = self._cassettes[item] = await asyncio.to_thread(Cassette, directory / file_name(item))
            self._cassettes.move_to_end(item)
            for name in [name for name, kept in self._cassettes.items() if not kept.is_requesting][:-_MOST_CASSETTES]:
                del self._cassettes[name]
            return found

    # -- for real ----------------------------------------------------------------------------------

    async def _live(self, call: _Prepared) -> tuple[CallResult, bool]:
        """Run it; returns the result, and whether to record it."""
        if call.tool.unavailable:
            raise PolicyRefusalError(f"{call.tool.name} cannot be used here: {call.tool.unavailable}")
        waited_since = time.monotonic()
        async with self._places[call.tool.name]:
            call.queue_s = time.monotonic() - waited_since
            if call.tool.stateful:
                await self._catch_up(call)
            call.began_at = time.monotonic()
            return await self._outcome(call, min(call.request.timeout_s, call.tool.timeout_s))

    async def _catch_up(self, call: _Prepared) -> None:
        """Make the calls that a cassette had answered, so that the tool is in the state the trajectory expects.

        Raises: InfraError: it is not, because one of them now ended otherwise (the site has changed)."""
        skipped, call.state.skipped = call.state.skipped, []
        for tool, arguments, recorded in skipped:
            earlier = _Prepared(call.request, tool, arguments, {}, call.state, began_at=time.monotonic())
            result, _ = await self._outcome(earlier, tool.timeout_s)
            if _essence(tool, result) != _essence(tool, recorded):
                raise InfraError(
                    f"cannot replay {call.tool.name}: an earlier call ({tool.name} {arguments!r}) no longer returns "
                    "what was recorded",
                    next_step="the site has changed since: delete the cassette of this item",
                )

    async def _outcome(self, call: _Prepared, limit_s: float) -> tuple[CallResult, bool]:
        try:
            async with asyncio.timeout(limit_s) as deadline:
                returned = await self._invoked(call)
        except ToolFailure as failure:
            return self._result(call, exit_code=1, stderr=str(failure)), failure.keep
        except TimeoutError as error:
            if not deadline.expired():
                raise self._broken(call, error) from error
            return self._result(call, stderr=f"timed out after {limit_s:g} s", timed_out=True), False
        except AgentEnvError:
            raise
        except Exception as error:
            raise self._broken(call, error) from error
        # Redacted before it is cut: half a secret is not recognised.
        content, cut = _fitted(self._secrets.redactor.value(returned), self._settings.max_result_bytes)
        return self._result(call, exit_code=0, content=content, truncated=cut), True

    async def _invoked(self, call: _Prepared) -> Any:
        given = {name: getattr(call.arguments, name) for name in type(call.arguments).model_fields}
        if call.tool.wants_run is not None:
            given[call.tool.wants_run] = ToolRun(call.request.scope, self._secrets.chosen(call.tool.secrets))
        return _finite(to_jsonable_python(await call.tool.run(**given)))

    def _result(self, call: _Prepared, **fields: Any) -> CallResult:
        duration_s = time.monotonic() - call.began_at
        return CallResult(id=call.request.id, queue_s=call.queue_s, duration_s=duration_s, **fields)

    def _broken(self, call: _Prepared, error: Exception) -> InfraError:
        """A tool that raised an unexpected exception: our fault, never the model's. The log has the location,
        without secrets."""
        trace = "".join(traceback.format_exception(error))
        logger.error("tool %s failed:\n%s", call.tool.name, self._secrets.redactor.text(trace))
        return InfraError(f"the tool {call.tool.name} failed: {type(error).__name__}: {error}")


def _essence(tool: ExternalTool, result: CallResult | Recording) -> list[Any]:
    """What two results of the same call must agree in, if they leave the same state."""
    content = result.content if isinstance(result.content, dict) else {}
    return [result.exit_code, *(content.get(name) for name in tool.same)]


def _not_replayed(tool: str, refused: Recording | None) -> AgentEnvError:
    """The refusal as recorded, otherwise that there is no recording."""
    if refused is None:
        return PolicyRefusalError(
            f"this run has no network: {tool} only replays recorded calls, and this one was not recorded"
        )
    kinds = (ToolCallError, PolicyRefusalError)
    return from_wire(refused.error, refused.message, "", *kinds, otherwise=PolicyRefusalError)


def _redacted(result: CallResult, redactor: Any) -> CallResult:
    changed = {
        "message": redactor.text(result.message),
        "stderr": redactor.text(result.stderr),
        "content": redactor.value(result.content),
    }
    return result.model_copy(update=changed)


def _finite(value: Any) -> Any:
    """NaN and infinities as text, by the names JavaScript has for them: JSON has no such numbers, and null would be
    another value."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


def _fitted(content: Any, limit_bytes: int) -> tuple[Any, bool]:
    """The content in at most about ``limit_bytes`` of JSON, and whether its end was cut off."""
    raw = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if not _is_utf8(raw):  # half a surrogate pair, which no answer could carry
        content = json.loads(raw.decode("utf-8", "replace"))
    if len(raw) <= limit_bytes:
        return content, False
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        others = len(raw) - len(content["text"].encode("utf-8", "surrogatepass"))
        if others < limit_bytes // 2:
            return {**content, "text": _head(content["text"], limit_bytes - others), "truncated": True}, True
    return {"text": _head(raw.decode("utf-8", "replace"), limit_bytes), "truncated": True}, True


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _head(text: str, limit_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")


class Budgets:
    """Counts per owner and tool. A limit of None never refuses."""

    def __init__(self) -> None:
        self._trajectories: OrderedDict[str, Counter[str]] = OrderedDict()
        self._groups: OrderedDict[str, Counter[str]] = OrderedDict()

    def spend(self, scope: CallScope, tool: str, *, per_trajectory: int | None, per_group: int | None) -> str | None:
        """Count one call; or return, for the model, why it may not be made (then nothing is counted)."""
        own = _counts_of(self._trajectories, scope.trajectory)
        if per_trajectory is not None and own[tool] >= per_trajectory:
            return f"{tool} may be called {_times(per_trajectory)}: the limit is reached, continue without it"
        group = _counts_of(self._groups, scope.group) if scope.group else Counter[str]()
        if per_group is not None and group[tool] >= per_group:
            reached = "the limit is reached, continue without it"
            return f"{tool} may be called {_times(per_group)} by the whole group: {reached}"
        own[tool] += 1
        group[tool] += 1
        return None

    def refund(self, scope: CallScope, tool: str) -> None:
        """Do not count a call that failed on our side."""
        for kept, owner in ((self._trajectories, scope.trajectory), (self._groups, scope.group)):
            if owner in kept and kept[owner][tool] > 0:
                kept[owner][tool] -= 1

    def ended(self, trajectory: str) -> None:
        """Forget the trajectory; its group's counts stay."""
        self._trajectories.pop(trajectory, None)


def _counts_of(kept: OrderedDict[str, Counter[str]], owner: str) -> Counter[str]:
    counts = kept.setdefault(owner, Counter())
    kept.move_to_end(owner)
    if len(kept) > _MOST_OWNERS:
        kept.popitem(last=False)
    return counts


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
