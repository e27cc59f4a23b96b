"""The error tree itself."""

from __future__ import annotations

import pytest

from agentenv.errors import AgentEnvError, ConfigError, SandboxUnavailableError, by_code, from_wire


@pytest.mark.parametrize("kind", by_code().values())
def test_a_copy_says_the_same_and_shares_no_traceback(kind: type[AgentEnvError]) -> None:
    words = ("field", "message") if issubclass(kind, ConfigError) else ("message",)
    made = kind(*words, next_step="cure")
    try:
        raise made
    except AgentEnvError as error:
        twin = error.copy()
    assert (type(twin), twin is made, twin.__traceback__) == (kind, False, None)
    assert (str(twin), twin.args, vars(twin)) == (str(made), made.args, vars(made))


def test_a_code_on_the_wire_means_the_class_that_defines_it() -> None:
    class OwnError(SandboxUnavailableError):
        """For one module's own use; the wire does not know it."""

    assert type(from_wire(OwnError.code, "m")) is SandboxUnavailableError
    assert {kind.code for kind in by_code().values()} == by_code().keys()
