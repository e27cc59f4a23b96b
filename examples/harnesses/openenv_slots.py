"""Slots as a container provider of OpenEnv (docs/harnesses.md):

env = EchoEnv.from_docker_image("localhost/echo-env", provider=SlotProvider()).sync()
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any
from urllib.request import ProxyHandler, build_opener

from openenv.core.containers.runtime.providers import ContainerProvider

from agentenv import shared_farm

_OPENER = build_opener(ProxyHandler({}))  # http_proxy is not for this machine's own servers


class SlotProvider(ContainerProvider):
    """One environment in a slot of the farm of this process, which has ``slots`` of them. ``root``: arguments of
    ``sandbox()``, such as ``memory_mib``, ``cpus`` or ``network``. A failure of the farm is raised as an InfraError."""

    def __init__(
        self, *, slots: int = 10, start_timeout_s: float = 600, ready_timeout_s: float = 120, **root: Any
    ) -> None:
        self._farm: dict[str, Any] = {"slots": slots, "start_timeout_s": start_timeout_s, "allow_network": True}
        self._root = {"network": "public", **root}
        self._ready_timeout_s = ready_timeout_s
        self._opened = ExitStack()
        self._server: Any = None

    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any
    ) -> str:
        if self._server is not None:
            raise RuntimeError("this provider has a container already: make another for each environment")
        with ExitStack() as opened:
            box = opened.enter_context(shared_farm(**self._farm).blocking.sandbox(image, **{**self._root, **kwargs}))
            server = box.start_command(env=env_vars)
            url = opened.enter_context(box.forward(port or 8000))
            self._opened, self._server = opened.pop_all(), server
        return url

    def wait_for_ready(self, base_url: str, timeout_s: float | None = None) -> None:
        if self._server is None:
            raise RuntimeError("no container was started")
        timeout_s = timeout_s or self._ready_timeout_s
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with suppress(OSError), _OPENER.open(f"{base_url}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
            time.sleep(0.1)
            self._server.state()  # or an InfraError
            if self._server.exit_code is not None:
                raise RuntimeError(f"the server ended with exit code {self._server.exit_code}: {self._printed()}")
        raise TimeoutError(f"the server was not ready after {timeout_s:g} s: {self._printed()}")

    def _printed(self) -> str:
        printed: bytes = self._server.read()
        return printed.decode(errors="replace")[-2000:]

    def stop_container(self) -> None:
        self._opened.close()
        self._server = None

    def close(self) -> None:
        self.stop_container()
