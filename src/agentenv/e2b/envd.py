"""E2B's daemon in a slot: the layer of an image that has it, starting it, and telling it whose sandbox it serves.

It is not part of agentenv (decision 0074); it is used as it is, by its options: ``-isnotfc`` (there is no Firecracker
around it) and ``-no-cgroups`` (a slot has its own).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from agentenv.deadlines import scaled
from agentenv.errors import ConfigError, SandboxUnavailableError, TaskError
from agentenv.sdk.async_sandbox import AsyncSandbox

PORT: Final = 49983
USER: Final = "user"
HOME: Final = f"/home/{USER}"
"""Who commands run as, and where, unless a template says otherwise: as in every E2B sandbox."""
_AT: Final = "/usr/bin/envd"
_NO_PROGRAMS: Final = "/nonexistent"
"""envd's own PATH. It runs each command by ``nice`` and ``ionice`` to take its own priority back, if it finds them;
slots do not let it. Commands get the PATH of the environment that it is told."""
_ANSWERS_S: Final = scaled(20.0)
_POLLS_S: Final = (0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
_OWN: Final = frozenset(
    {
        "HOME", "USER", "LOGNAME", "PWD", "OLDPWD", "SHLVL", "_", "SHELL", "TMPDIR", "TERM", "PAGER", "GIT_PAGER",
        "MANPAGER", "LESS", "LC_CTYPE",
    }
)  # fmt: skip
"""Variables of the process that was asked and of slots, not of the image."""
_PREPARE: Final = f"""
set -e
if ! grep -q '^{USER}:' /etc/passwd; then
  uid=1000; while grep -q "^[^:]*:[^:]*:$uid:" /etc/passwd; do uid=$((uid + 1)); done
  gid=1000; while grep -q "^[^:]*:[^:]*:$gid:" /etc/group; do gid=$((gid + 1)); done
  echo "{USER}:x:$uid:$gid::{HOME}:/bin/bash" >> /etc/passwd
  echo "{USER}:x:$gid:" >> /etc/group
  if [ -e /etc/shadow ]; then echo "{USER}:*:19000:0:99999:7:::" >> /etc/shadow; fi
  mkdir -p {HOME}
  chown "$uid:$gid" {HOME}
fi
if [ -d /etc/sudoers.d ]; then
  echo "{USER} ALL=(ALL) NOPASSWD:ALL" > /etc/sudoers.d/{USER}
  chmod 440 /etc/sudoers.d/{USER}
fi
"""


@dataclass(frozen=True)
class Envd:
    """The program, as it was found on this machine."""

    path: Path
    version: str
    digest: str

    @classmethod
    async def at(cls, path: Path) -> Envd:
        """Raises ConfigError when it is missing, or does not run here."""
        try:
            digest = await asyncio.to_thread(lambda: hashlib.sha256(path.read_bytes()).hexdigest())
            asked = await asyncio.create_subprocess_exec(
                path, "-version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            said, _ = await asked.communicate()
        except OSError as error:
            raise ConfigError("e2b.envd", f"{path} cannot be used: {error}", next_step=MAKE) from error
        version = said.decode(errors="replace").strip()
        if asked.returncode or not re.fullmatch(r"\d+\.\d+\.\d+", version):
            raise ConfigError("e2b.envd", f"{path} is not E2B's envd: it said {version[:80]!r}", next_step=MAKE)
        return cls(path, version, digest)

    async def install(self, box: AsyncSandbox) -> None:
        """Put it into a slot, with the user that E2B's sandboxes have. Raises TaskError when the image lacks what E2B's
        own templates have: bash and the programs of coreutils."""
        await box.upload(self.path, _AT)
        await _checked(box, _PREPARE)

    async def start(self, box: AsyncSandbox, http: aiohttp.ClientSession, url: str, told: dict[str, Any]) -> None:
        """Start it in a slot whose image has it, and tell it whose it is (``POST /init``). ``url``: where it answers.
        Raises SandboxUnavailableError."""
        argv = [_AT, "-isnotfc", "-no-cgroups", "-port", str(PORT)]
        started = await box.start(argv, cwd="/", user="0", env={"HOME": "/root", "PATH": _NO_PROGRAMS})
        polls, loop = iter(_POLLS_S), asyncio.get_running_loop()
        ends_s, pause_s = loop.time() + _ANSWERS_S, 0.0
        why = ""
        while loop.time() < ends_s:
            pause_s = next(polls, _POLLS_S[-1])
            await asyncio.sleep(pause_s)
            try:
                async with http.post(f"{url}/init", json=told) as reply:
                    if reply.status == 204:
                        return
                    why = f"HTTP {reply.status}: {(await reply.text())[:300]}"
                    break
            except (aiohttp.ClientError, OSError) as error:
                why = str(error) or type(error).__name__
        said = (await started.read()).decode(errors="replace")[-500:]
        raise SandboxUnavailableError(f"envd does not answer in the slot: {why} {said}".strip(), next_step=MAKE)


async def environment_of(box: AsyncSandbox) -> dict[str, str]:
    """The environment that a slot's image gives its programs: envd does not pass its own on. Raises TaskError."""
    asked = await _checked(box, "env -0")
    pairs = (entry.partition("=") for entry in asked.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs if name not in _OWN and not name.startswith("AGENTENV_")}


MAKE: Final = "build it: `agentenv farm e2b-build`, or give the path of one (docs/e2b.md)"


async def _checked(box: AsyncSandbox, script: str) -> str:
    done = await box.exec(["/bin/bash", "-c", script], user="0", cwd="/")
    if not done.success:
        raise TaskError(
            f"the image cannot be a template: {shlex.quote(script.strip()[:40])}… ended with {done.exit_code}: "
            f"{done.stderr.strip()[-300:]}",
            next_step="use one with bash and coreutils, as Debian's have",
        )
    return done.stdout
