"""The error tree.

Every class states whose failure it is (``fault``), what survived and what to do next::

    AgentEnvError
    ├── ConfigError                 a setting is missing, contradicts another, or is out of range
    │   ├── DockerfileError             a Dockerfile or its build context is wrong, or needs what is not supported
    │   ├── HookError                   also a TypeError: a hook is missing, or could not be called
    │   ├── MissingExtraError           also an ImportError: a package of an extra is not installed
    │   ├── QuotaError                  more slots than this run may ever have on the farm
    │   ├── UnauthorizedError           the service does not accept the token
    │   └── ForbiddenError              the token is good, and does not allow this
    ├── ToolCallError               fault=model: the call itself is wrong; the model may correct it
    │   ├── UnknownToolError
    │   ├── InvalidArgumentsError
    │   │   └── UserUnsupportedError        a slot without an image has one user, and the call names another
    │   ├── SessionBusyError            the terminal session already runs a command
    │   └── UnknownSessionError         no such session, process or tmux session in the slot
    ├── PolicyRefusalError          fault=policy: a well-formed call that the rules forbid
    ├── SlotDestroyedError          fault=policy: the policy's own commands destroyed its slot; never retried
    ├── ServingEndedError           fault=policy: a process of the slot ended a port that was answered outside it
    ├── TaskError                   fault=task: the user's own task, verifier or preparation raised
    │   ├── BadImageError               the task's image is malformed, or has what slots cannot have
    │   └── BuildStepError              a command of a Dockerfile failed, or took too long
    └── InfraError                  fault=infra: ours; never a reward, never shown to the model
        ├── SandboxUnavailableError     no container can serve here (cause and cure are named)
        │   ├── CheckpointError             no checkpoint was made, or there is none of that name
        │   ├── SelfTestError           the container could not prove what it promises
        │   ├── StartTimeoutError       did not become ready in time; retrying may succeed
        │   ├── MachineFullError        the machine runs its maximum of containers; retrying may succeed
        │   └── JobOwnedError           another run owns the Nomad job (it is named); nothing was changed
        ├── AcquireTimeoutError         no slot became free before the deadline
        ├── LeaseLostError              the slot is no longer this trajectory's
        │   ├── StaleLeaseError             another epoch owns the slot now
        │   ├── ContainerLostError          the container died with the slot
        │   └── LeaseReclaimedError         the farm took the slot back; the retry is not counted
        ├── ConnectionLostError         the container could not be reached in time
        │   └── FarmUnreachableError        the farm service could not be reached in time
        ├── FencedError                 a newer farm controls the container
        ├── TooManyRequestsError        the token exceeds its request rate; retry later
        ├── CallLostError               the call may have run, its result is not available
        ├── ImageUnavailableError       an image could not be fetched; retrying may succeed
        ├── ModelServerError            the model's server failed or could not be reached
        │   └── DoubtfulTurnError           it returned no turn, perhaps because of the model's output; never retried
        ├── ProtocolError               the other side violated the wire contract
        └── PoolClosedError             the pool (or session) was closed while in use

A failing *command* is not in this tree: it is data (``CallResult.exit_code``).
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self

Fault = Literal["none", "model", "task", "infra", "policy"]
"""Whose failure a result reports; ``none`` when the tool did its work (whatever the exit code)."""


class AgentEnvError(Exception):
    """Root of everything agentenv raises on purpose.

    ``code`` is the stable machine-readable name that also travels on the wire; ``next_step`` is
    one sentence with what to do, empty when the message already does.
    """

    code: ClassVar[str] = "error"
    fault: ClassVar[Fault] = "infra"

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message} ({self.next_step})" if self.next_step else self.message

    def copy(self) -> Self:
        """The same error as a fresh exception: one instance raised in several tasks mixes their tracebacks."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        return twin


class ConfigError(AgentEnvError):
    """A setting is wrong. ``field`` names it; nothing was started."""

    code = "config"
    fault: ClassVar[Fault] = "task"

    def __init__(self, field: str, message: str, *, next_step: str = "") -> None:
        super().__init__(f"{field}: {message}", next_step=next_step)
        self.field = field


class DockerfileError(ConfigError):
    """A Dockerfile or its build context is wrong, or needs what building on slots does not have. ``file``, ``line``
    (from 1; 0 is none) and ``instruction`` say where. No step of it ran after the one that is named."""

    code = "dockerfile"

    def __init__(
        self, field: str, message: str, *, next_step: str = "", file: str = "", line: int = 0, instruction: str = ""
    ) -> None:
        super().__init__(field, message, next_step=next_step)
        self.file = file
        self.line = line
        self.instruction = instruction


class HookError(ConfigError, TypeError):
    """A hook of an environment is missing, could not be called, or would never be called; nothing was started."""

    code = "hook"


class MissingExtraError(ConfigError, ImportError):
    """A package is not installed that belongs to one of agentenv's extras, which the message names."""

    code = "missing_extra"


class QuotaError(ConfigError):
    """More slots were requested than the run may ever have: waiting cannot help. Nothing was leased."""

    code = "quota"


class UnauthorizedError(ConfigError):
    """The service does not accept the token: it is missing, garbled, expired or revoked. Nothing was done."""

    code = "unauthorized"


class ForbiddenError(ConfigError):
    """The token is accepted but does not allow this, or not for this run. Nothing was done."""

    code = "forbidden"


_EXTRAS: Final = {
    **dict.fromkeys(
        ("atroposlib", "datasets", "greenlet", "openai", "tokenizers", "transformers", "wandb", "yaml"), "env"
    ),
    **dict.fromkeys(("mcp", "mcp_types", "sse_starlette"), "mcp"),
    "opentelemetry": "otel",
}
"""The extra of a package that may be missing; all others belong to agentenv[farm]."""


def missing_extra(what: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """What a failed import means for ``what``; None if the missing module is agentenv's own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "agentenv"):
        return None
    extra = _EXTRAS.get(package, "farm")
    return MissingExtraError(
        what, f"needs agentenv[{extra}] ({package} is not installed)", next_step=f"pip install 'agentenv[{extra}]'"
    )


class ToolCallError(AgentEnvError):
    """The model's call is wrong. Nothing ran; the message is written for the model."""

    code = "tool_call"
    fault: ClassVar[Fault] = "model"


class UnknownToolError(ToolCallError):
    """There is no enabled tool of that name. Nothing ran."""

    code = "unknown_tool"


class InvalidArgumentsError(ToolCallError):
    """The arguments do not fit the tool's schema. Nothing ran."""

    code = "invalid_arguments"


class UserUnsupportedError(InvalidArgumentsError):
    """The call names a user, and its slot has no image: all its programs run as its one user. Nothing ran."""

    code = "user_unsupported"


class SessionBusyError(ToolCallError):
    """The terminal session is running a command; the message names it. Nothing was typed."""

    code = "session_busy"


class UnknownSessionError(ToolCallError):
    """The slot has no session or process of that name (any more). Nothing ran."""

    code = "unknown_session"


class PolicyRefusalError(AgentEnvError):
    """The call is well formed but forbidden (an archive with an entry outside its destination, say). Nothing ran."""

    code = "refused"
    fault: ClassVar[Fault] = "policy"


class SlotDestroyedError(AgentEnvError):
    """The policy's own commands destroyed its slot (its agent was killed, or a killed call did not end). The
    workspace is lost. The policy caused it, so the rollout ends here and is never retried."""

    code = "slot_destroyed"
    fault: ClassVar[Fault] = "policy"


class ServingEndedError(AgentEnvError):
    """A port of the slot that was answered outside it is no longer: a process of the slot killed what listened there,
    or broke its protocol in its place. The slot is alive; the port can be served again."""

    code = "serving_ended"
    fault: ClassVar[Fault] = "policy"


class TaskError(AgentEnvError):
    """Code of the environment's author raised (preparation, verifier). The slot survived."""

    code = "task"
    fault: ClassVar[Fault] = "task"


class BadImageError(TaskError):
    """The image of a task is malformed, is for another machine, or has what slots cannot have. Nothing of it was
    stored; another attempt fails alike."""

    code = "bad_image"


class BuildStepError(TaskError):
    """A command of a Dockerfile ended with an exit code other than 0, or was ended at its timeout (``exit_code`` is
    None). ``output`` has its last lines, ``line`` is the Dockerfile's. What earlier steps built stays cached."""

    code = "build_step"

    def __init__(
        self, message: str, *, next_step: str = "", line: int = 0, exit_code: int | None = None, output: str = ""
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.line = line
        self.exit_code = exit_code
        self.output = output


class InfraError(AgentEnvError):
    """An infrastructure failure. The rollout may be retried on a new slot; it must never be scored."""

    code = "infra"
    fault: ClassVar[Fault] = "infra"


class SandboxUnavailableError(InfraError):
    """No container can serve. Nothing runs; the message names the cause, ``next_step`` the cure."""

    code = "sandbox_unavailable"


class CheckpointError(SandboxUnavailableError):
    """A checkpoint was not made, or is not there: the message says why. The slot's files are as they were."""

    code = "checkpoint"


class SelfTestError(SandboxUnavailableError):
    """A container started but could not prove one of its promises, so it refuses to serve."""

    code = "self_test_failed"


class StartTimeoutError(SandboxUnavailableError):
    """A container did not become ready in time, or did not finish its self-test. Nothing was proved either way: on
    an overloaded machine the next start may succeed, so it is retried."""

    code = "start_timeout"


class JobOwnedError(SandboxUnavailableError):
    """Another run owns the Nomad job: only that run scales, replaces and purges. Nothing of the job was changed;
    the message names the owner, ``next_step`` what to do."""

    code = "job_owned"


class MachineFullError(SandboxUnavailableError):
    """The machine runs its maximum number of containers; a later start may succeed."""

    code = "machine_full"


class AcquireTimeoutError(InfraError):
    """No slot became free before the deadline. Nothing was leased."""

    code = "acquire_timeout"


class LeaseLostError(InfraError):
    """The slot no longer belongs to this trajectory; the content of its workspace is lost."""

    code = "lease_lost"


class StaleLeaseError(LeaseLostError):
    """The lease's epoch has ended (expired, released or reset). The call did not run."""

    code = "stale_lease"


class ContainerLostError(LeaseLostError):
    """The container died or was removed, with every slot in it."""

    code = "container_lost"


class LeaseReclaimedError(LeaseLostError):
    """The farm took the slot back for a run below its guarantee. The rollout starts again on a new slot, and this
    does not count as one of its retries."""

    code = "lease_reclaimed"


class ConnectionLostError(InfraError):
    """The container could not be reached in time; the slot may still be alive."""

    code = "connection_lost"


class FarmUnreachableError(ConnectionLostError):
    """The farm service could not be reached in time. Slots that are leased already stay usable."""

    code = "farm_unreachable"


class FencedError(InfraError):
    """The container has obeyed a farm of a later generation: this one no longer controls it. Nothing was changed."""

    code = "fenced"


class TooManyRequestsError(InfraError):
    """The token exceeds its request rate at the farm. Nothing was counted; ``retry_after_s``: when it may
    ask again."""

    code = "too_many_requests"

    def __init__(self, message: str, *, next_step: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, next_step=next_step)
        self.retry_after_s = retry_after_s


class CallLostError(InfraError):
    """The call may have run (at most once), but its result is no longer available."""

    code = "call_lost"


class ImageUnavailableError(InfraError):
    """An image could not be fetched from its registry or engine. Nothing was stored; what had arrived
    is used by the next attempt."""

    code = "image_unavailable"


class ModelServerError(InfraError):
    """The model's server failed, refused or could not be reached. The slot survived."""

    code = "model_server"


class DoubtfulTurnError(ModelServerError):
    """The model's server returned no turn, and the model's output may be the cause: it refused the conversation, or
    a turn without a token limit did not end. Neither scored nor retried; otherwise a policy could get new attempts
    this way."""

    code = "doubtful_turn"


class ProtocolError(InfraError):
    """The other side violated the wire contract (version, shape, size)."""

    code = "protocol"


class PoolClosedError(InfraError):
    """The pool or session was closed while still in use."""

    code = "closed"


def by_code() -> dict[str, type[AgentEnvError]]:
    """Every class of the tree that has a ``code`` of its own, by it: maps a wire error to its exception."""
    found: dict[str, type[AgentEnvError]] = {}
    stack: list[type[AgentEnvError]] = [AgentEnvError]
    while stack:
        cls = stack.pop()
        if "code" in vars(cls):  # a subclass that inherits it is for this process only
            found[cls.code] = cls
        stack.extend(cls.__subclasses__())
    return found


def from_wire(
    code: str | None,
    message: str,
    next_step: str = "",
    *expected: type[AgentEnvError],
    otherwise: type[ToolCallError | PolicyRefusalError] | None = None,
) -> AgentEnvError:
    """The exception that a wire error stands for.

    If its class is not among ``expected`` (any class, if not given), the other side must not name it: the result is
    then ``otherwise``, by default a ProtocolError with the code.
    """
    kind = by_code().get(code or "")
    if kind is None or not issubclass(kind, expected or (AgentEnvError,)):
        if otherwise is not None:
            return otherwise(message, next_step=next_step)
        return ProtocolError(f"{code or 'no error code'}: {message}", next_step=next_step)
    if issubclass(kind, ConfigError):
        field, _, reason = message.partition(": ")
        return kind(field, reason, next_step=next_step)
    return kind(message, next_step=next_step)
