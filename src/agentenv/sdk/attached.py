"""How another process of this user opens a shell in a slot that this one leases: by a file that says where the slot is,
and has the right to use it (:mod:`agentenv.run_files`).

The lease stays this process's: it renews and ends it. What the other one has started ends with the lease, because the
container ends it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from agentenv.config import state_dir
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, ConfigError, SandboxUnavailableError
from agentenv.run_files import RunFile, is_held, remove_if_dead
from agentenv.wire.leases import LeaseKey

_KIND: Final = "shell"
_OPTION: Final = "--attach"
_PROGRAM: Final = (sys.executable, "-P", "-m", "agentenv.cli")
"""Whatever the PATH of the other terminal is; -P: no module of the directory that it is in."""


@dataclass(frozen=True)
class AttachedLease:
    """A lease that another process holds, for what goes over a connection of its own (``TransferLease``)."""

    key: LeaseKey
    container: ContainerHandle

    async def wait_lost(self) -> AgentEnvError:
        """Never returns: only who renews a lease learns of its loss. The container ends the connection then."""
        never: asyncio.Future[AgentEnvError] = asyncio.get_running_loop().create_future()
        return await never


def offered(key: LeaseKey, container: ContainerHandle) -> RunFile:
    """A file that offers this lease, until it is closed. ``container`` has the token that is offered. Removes what dead
    processes have left of theirs. Raises ConfigError, SandboxUnavailableError."""
    state = state_dir()
    for left in state.glob(f"{_KIND}-*"):
        remove_if_dead(left)
    offer = RunFile.open(state, _KIND, secrets.token_hex(4))
    try:
        offer.write({"key": key.model_dump(), "container": asdict(container)})
    except OSError as error:
        offer.close()
        raise SandboxUnavailableError(f"cannot write {offer.file}: {error.strerror}", next_step="make room") from error
    return offer


def attached(file: Path) -> AttachedLease:
    """The lease that a file offers. Raises ConfigError."""
    ask = "ask the process that has the sandbox for another command (shell_command())"
    try:
        said = json.loads(file.read_text())
        lease = AttachedLease(LeaseKey.model_validate(said["key"]), ContainerHandle(**said["container"]))
    except FileNotFoundError as error:
        raise ConfigError(
            _OPTION, f"there is no file {file}: the sandbox was closed, or never had it", next_step=ask
        ) from error
    except OSError as error:
        raise ConfigError(_OPTION, f"{file} cannot be read: {error.strerror}", next_step=ask) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(_OPTION, f"{file} is not a file of a sandbox's shell_command()", next_step=ask) from error
    if not is_held(file.parent):
        raise ConfigError(_OPTION, "the process that had the sandbox has ended, and the sandbox with it", next_step=ask)
    return lease


def attach_command(file: Path, user: str | None) -> list[str]:
    """The command that opens a shell in the slot that the file offers."""
    command = [*_PROGRAM, "shell", _OPTION, str(file.absolute())]
    return command if user is None else [*command, "--user", user]
