from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.supervisor.limits import Machine
from agentenv.tasks.harbor.machine import Caps, check_fits
from tests.unit.tasks.test_harbor_task_file import IMAGE, task
from tests.unit.tasks.test_harbor_terminal_bench import CLIENT, TASK, read

THIS = Machine(cores=2, memory_bytes=4096 * 2**20)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("cpus = 4", r"environment\.cpus: task one: requests 4 cores, but this machine has 2 \(.*max_cpus=2"),
        ("cpus = 2.5", r"environment\.cpus: .*2.5 cores"),
        ("memory_mb = 4097", r"environment\.memory_mb: .*requests 4097 MiB, .* has 4096 \(.*max_memory_mib=4096"),
        ("memory = '8G'", r"environment\.memory_mb: .*8192 MiB"),
        ("[verifier.environment]\ncpus = 3", r"verifier\.environment\.cpus: .*3 cores"),
        ("[verifier.environment]\nmemory_mb = 5000", r"verifier\.environment\.memory_mb: .*5000 MiB"),
    ],
)
def test_more_than_this_machine_has_is_refused_by_the_tasks_field(tmp_path: Path, toml: str, said: str) -> None:
    found = task(tmp_path, f"{IMAGE}{toml}\n")
    with pytest.raises(ConfigError, match=said):
        check_fits(found, THIS)
    check_fits(Caps(cpus=2, memory_mib=4096).of(found), THIS)


def test_the_service_of_terminal_bench_1_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.client\.cpus: .*8 cores"):
        check_fits(read(tmp_path, TASK, CLIENT + "    cpus: 8\n"), THIS)


def test_a_cap_raises_nothing_and_what_fits_is_left_alone(tmp_path: Path) -> None:
    found = task(tmp_path, f"{IMAGE}cpus = 2\nmemory_mb = 4096\n")
    check_fits(found, THIS)
    assert Caps().of(found) == Caps(cpus=8, memory_mib=9000).of(found) == found
    capped = Caps(cpus=1, memory_mib=512).of(found)
    assert (capped.cpus, capped.memory_mib) == (1, 512)
    nothing = task(tmp_path, IMAGE, name="two")
    assert Caps(cpus=1, memory_mib=512).of(nothing) == nothing
