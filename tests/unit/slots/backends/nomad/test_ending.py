"""How a job ends: its containers first, then what Nomad knows of it."""

from __future__ import annotations

from typing import cast

import pytest

from agentenv.config import NomadSettings
from agentenv.errors import SandboxUnavailableError
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.ending import end_job


class Nomad:
    """A job whose allocations end one by one, as ``left`` says; the last answer stays."""

    def __init__(self, *left: int) -> None:
        self.settings = NomadSettings(job_id="farm")
        self.asked: list[str] = []
        self._left = list(left)

    async def deregister(self, *, purge: bool) -> None:
        self.asked.append("purge" if purge else "stop")

    async def left_over(self) -> int:
        left = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        self.asked.append(str(left))
        return left


async def test_it_is_forgotten_when_its_containers_have_ended() -> None:
    nomad = Nomad(2, 1, 0)
    await end_job(cast("NomadApi", nomad))
    assert nomad.asked == ["stop", "2", "1", "0", "purge"]


async def test_containers_that_do_not_end_are_counted_and_their_job_is_kept() -> None:
    nomad = Nomad(2)
    with pytest.raises(SandboxUnavailableError, match=r"2 allocations of farm are still running after 0.05 s") as left:
        await end_job(cast("NomadApi", nomad), within_s=0.05)
    assert "nomad node status" in left.value.next_step
    assert "purge" not in nomad.asked
