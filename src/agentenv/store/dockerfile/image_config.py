"""The configuration of an image, as far as a Dockerfile reads or writes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of an image that sets none; BuildKit's ``system.DefaultPathEnv``."""
DEFAULT_SHELL: Final = ("/bin/sh", "-c")


@dataclass(frozen=True)
class ImageConfig:
    """The ``config`` object of an OCI image, with Docker's additions ``Shell`` and ``OnBuild``.

    ``env`` keeps its order. ``workdir`` is absolute, or empty for ``/``. ``user`` is as written: a name or a number,
    perhaps with a group after a colon; empty is root. A ``cmd`` or an ``entrypoint`` of None is not set.
    """

    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    cmd: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    shell: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""
    on_build: tuple[str, ...] = ()

    def to_oci(self) -> dict[str, Any]:
        """The ``config`` object; what is not set is left out."""
        config: dict[str, Any] = {
            "Env": [f"{name}={value}" for name, value in self.env],
            "User": self.user,
            "WorkingDir": self.workdir,
            "Shell": list(self.shell),
            "Labels": dict(self.labels),
            "ExposedPorts": {port: {} for port in self.ports},
            "Volumes": {path: {} for path in self.volumes},
            "StopSignal": self.stop_signal,
        }
        commands = {"Cmd": self.cmd, "Entrypoint": self.entrypoint}
        given = {name: list(command) for name, command in commands.items() if command is not None}
        return {**{name: value for name, value in config.items() if value}, **given}

    def with_env(self, name: str, value: str) -> ImageConfig:
        """A variable set; one that was there keeps its place."""
        return replace(self, env=with_pair(self.env, name, value))

    def with_label(self, name: str, value: str) -> ImageConfig:
        """A label set."""
        return replace(self, labels=with_pair(self.labels, name, value))


def with_pair(pairs: tuple[tuple[str, str], ...], name: str, value: str) -> tuple[tuple[str, str], ...]:
    """The pairs with this one, in the place of an older one of its name."""
    return tuple({**dict(pairs), name: value}.items())
