"""Harbor's trials in slots and in Harbor's own docker environment: the same small task, image and oracle, in turn.

    python -m benchmarks.harbor_trials --harbor DIR/bin/harbor [--rounds 3] [--at-once 1,8]

Needs a Docker engine (``DOCKER_HOST``) and the plugin ``docker compose``, beside what slots need. The image is Debian's
base: it is put into the engine and into an image store of this run, and each environment plays one trial, before
anything is measured. Prints medians over all trials of all rounds, and docker's divided by those of slots.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from agentenv.image.base import base_tarball
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import PATH, make_base
from tests.debian_images import base_in_cache

ROOT: Final = Path(__file__).parents[1]
IMAGE: Final = "localhost/agentenv-harbor-trials:1"
AGENTENV: Final = ("--env", "agentenv.harnesses.harbor:AgentEnvEnvironment")
DOCKER: Final = "docker"
KINDS: Final = {
    DOCKER: ("--env", "docker"),
    "slots": AGENTENV,
    "shared": (*AGENTENV, "--ek", "slots={at_once}"),
}
"""Harbor's options for each; ``slots``: a container for each trial, ``shared``: the trials of a job share one."""
PHASES: Final = ("environment", "agent", "verifier", "end", "trial")
TASK: Final = {
    "instruction.md": "Write the number of lines of /etc/passwd to /srv/lines.txt.\n",
    "solution/solve.sh": "#!/bin/bash\nwc -l < /etc/passwd > /srv/lines.txt\n",
    "tests/test.sh": "#!/bin/bash\n"
    'reward=0; [ "$(cat /srv/lines.txt)" = "$(wc -l < /etc/passwd)" ] && reward=1\n'
    'echo "$reward" > /logs/verifier/reward.txt\n',
    "environment/README": "There is nothing to see here.\n",
    "task.toml": f'[environment]\ncpus = 1\nmemory_mb = 512\ndocker_image = "{IMAGE}"\n',
}


class Missing(Exception):
    """What has to be there to measure at all."""


def check(harbor: str) -> str:
    """The versions of what is measured. Raises Missing, which names what is not there."""
    if not shutil.which(harbor):
        raise Missing(f"no program {harbor}: make harnesses HARNESSES=harbor makes it, or pip install harbor")
    if not shutil.which("docker"):
        raise Missing("no program docker: apt-get install docker.io, or Docker's own packages")
    found = []
    for what, argv, cure in (
        ("Docker engine", ("version", "--format", "{{.Server.Version}}"), "start dockerd, or name one by DOCKER_HOST"),
        ("docker compose", ("compose", "version", "--short"), "install its version 2 as a plugin of docker"),
    ):
        ran = subprocess.run(["docker", *argv], capture_output=True, text=True, check=False)
        if ran.returncode:
            said = (ran.stderr.strip() or ran.stdout.strip()).partition("\n")[0]
            raise Missing(f"no {what} ({said}): {cure}")
        found.append(f"{what} {ran.stdout.strip()}")
    ran = subprocess.run([harbor, "--version"], capture_output=True, text=True, check=True)
    return ", ".join((f"Harbor {ran.stdout.strip()}", *found))


@contextmanager
def image(place: Path) -> Iterator[None]:
    """Debian's base in the engine, and in this process's image store, which is in that directory from now on."""
    os.environ["AGENTENV_CACHE_DIR"] = str(base_in_cache(place / "cache"))
    os.environ["AGENTENV_STATE_DIR"] = str(place / "state")
    make_base(Store.open(store_directory()), IMAGE)
    tarball = base_tarball(place / "cache" / "image")
    changes = ("--change", f"ENV PATH={PATH}", "--change", 'CMD ["bash"]')
    subprocess.run(["docker", "import", *changes, str(tarball), IMAGE], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["docker", "rmi", "--force", IMAGE], check=False, capture_output=True)


def write_task(directory: Path) -> None:
    """The task, of the image as it is."""
    for name, text in TASK.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass
class Measured:
    """What the trials of one kind took, in seconds."""

    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    per_trial: list[float] = field(default_factory=list)
    """For each job: from its first trial's begin to its last one's end, divided by their number."""

    def add(self, results: list[dict[str, Any]]) -> None:
        """The trials of one job."""
        for result in results:
            spans = [_span(result[name]) for name in ("environment_setup", "agent_execution", "verifier")]
            whole = _span(result)
            marks = (whole[0], spans[0][1], spans[1][1], spans[2][1], whole[1])
            for phase, (before, after) in zip(PHASES, pairwise(marks), strict=False):
                self.phases[phase].append(after - before)
            self.phases["trial"].append(whole[1] - whole[0])
        every = [_span(result) for result in results]
        self.per_trial.append((max(end for _, end in every) - min(begin for begin, _ in every)) / len(every))


def _span(entry: dict[str, str]) -> tuple[float, float]:
    began, ended = (datetime.fromisoformat(entry[name]).timestamp() for name in ("started_at", "finished_at"))
    return began, ended


def play(place: Path, harbor: str, kind: str, at_once: int, trials: int) -> list[dict[str, Any]]:
    """One job of that many trials. Raises RuntimeError when one of them does not score 1."""
    job = Path(tempfile.mkdtemp(dir=place, prefix=f"{kind}-"))
    options = [option.format(at_once=at_once) for option in KINDS[kind]]
    command = [
        *(harbor, "run", "--yes", "--quiet", "--path", str(place / "task"), "--agent", "oracle", *options),
        *("--n-attempts", str(trials), "--n-concurrent", str(at_once), "--jobs-dir", str(job), "--job-name", "job"),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "DOCKER_CONFIG": os.environ.get("DOCKER_CONFIG", str(Path.home() / ".docker")),
        "HOME": str(place),  # what Harbor keeps there
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    results = [json.loads(file.read_text()) for file in job.glob("job/*/result.json")]
    scores = [(result["verifier_result"] or {}).get("rewards", {}).get("reward") for result in results]
    if ran.returncode or scores != [1] * trials:
        why = next((result["exception_info"] for result in results if result["exception_info"]), None)
        said = why["exception_message"] if why else f"{ran.stdout}{ran.stderr}"[-2000:]
        raise RuntimeError(f"{kind}, {at_once} at once: rewards {scores}, exit code {ran.returncode}: {said}")
    return results


def measure(place: Path, given: argparse.Namespace, at_once: int) -> dict[str, Measured]:
    """Every kind in each round, another one first in each."""
    measured = {kind: Measured() for kind in KINDS}
    trials = given.times * at_once
    for kind in KINDS:
        play(place, given.harbor, kind, at_once, 1)
    for number in range(given.rounds):
        first = number % len(KINDS)
        for kind in [*KINDS, *KINDS][first : first + len(KINDS)]:
            measured[kind].add(play(place, given.harbor, kind, at_once, trials))
            latest = median(measured[kind].phases["trial"][-trials:])
            print(f"  round {number + 1}, {kind}: {latest:.2f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    return measured


def show(measured: dict[str, Measured]) -> None:
    """Medians, and docker's divided by each."""
    rows = {phase: {kind: median(of.phases[phase]) for kind, of in measured.items()} for phase in PHASES}
    rows["trial but its end"] = {
        kind: median(a - b for a, b in zip(of.phases["trial"], of.phases["end"], strict=True))
        for kind, of in measured.items()
    }
    rows["job, per trial"] = {kind: median(of.per_trial) for kind, of in measured.items()}
    print(f"  {'median':20}" + "".join(f"{kind:>18}" for kind in measured))
    for name, values in rows.items():
        shown = (
            f"{value:8.2f} s" + (f" {values[DOCKER] / value:5.1f} x" if kind != DOCKER else " " * 8)
            for kind, value in values.items()
        )
        print(f"  {name:20}" + "".join(f"{text:>18}" for text in shown))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harbor_trials", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--harbor", default="harbor", help="Harbor's program (default: the one in PATH)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind (default: 3)")
    parser.add_argument("--at-once", default="1,8", help="comma-separated numbers of trials at once (default: 1,8)")
    parser.add_argument("--times", type=int, default=3, help="trials of a job, divided by those at once (default: 3)")
    given = parser.parse_args()
    try:
        print(check(given.harbor))
    except Missing as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-") as made, image(Path(made)):
        write_task(Path(made) / "task")
        for at_once in map(int, given.at_once.split(",")):
            print(f"{at_once} at once, {given.rounds} rounds of {given.times * at_once} trials of each kind")
            show(measure(Path(made), given, at_once))


if __name__ == "__main__":
    main()
