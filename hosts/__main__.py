"""``make hosts`` (``GUEST=bookworm``): boot each guest, try every row on it, and print what came of it.

As root, with QEMU; without a processor that runs guests (KVM) they are emulated, and everything takes 10 to 20 times as
long. Everything printed by the guests is kept in out/hosts/; the table for docs/hosts.md is out/hosts/table.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from agentenv.deadlines import VARIABLE as TIME_FACTOR
from agentenv.sandbox.machine.qemu import PROGRAM, accelerated
from hosts import disk
from hosts.guests import GUESTS
from hosts.machine import Done, Machine
from hosts.nodes import GUEST as NODES_GUEST
from hosts.rows import ROWS, Long, Outcome, Row, agentenv, command

OUT: Final = Path("out/hosts")
_PROGRAMS: Final = (PROGRAM, "mmdebstrap", "ssh", "mkfs.ext4")
_OF_IMAGES: Final = "slots with images"
"""doctor's finding about them; they need more of a kernel than others, which is a column of its own."""
_TWO_NODES: Final = "two nodes"
_OF_CI: Final = ("ci demo", "ci tests")
"""Only where they are named: each is a part of another check."""
_LONG: Final = ",".join((*(one for one in get_args(Long) if one not in _OF_CI), _TWO_NODES))
_AGENTENV: Final = ".venv/bin/agentenv"
_PYTEST: Final = ".venv/bin/python -m pytest --color=no -q -p no:cacheprovider"
_BEGIN: Final = (
    f"nohup setsid {_AGENTENV} up --slots 2 --port 0 >/tmp/up.log 2>&1 </dev/null & "
    f"for _ in $(seq 300); do {_AGENTENV} status >/dev/null 2>&1 && exit; sleep 2; done; cat /tmp/up.log; exit 1"
)
_LINES: Final[Mapping[Long, Sequence[str]]] = {
    "nomad": (
        "make nomad-dev",
        f"{_AGENTENV} up --backend nomad --slots 4",  # a guest has no room for ten
        f"{_AGENTENV} exec --backend nomad -- echo hi",
        f"{_AGENTENV} down --backend nomad",
        "make nomad-dev-down",
    ),
    "nomad demo": ("make nomad-dev", "make demo BACKEND=nomad", "make nomad-dev-down"),
    # The guest of CI is emulated, where each rollout takes minutes.
    "ci demo": (f"make demo DEMO_ARGS='--package {disk.TASKS_OF_CI} --groups 1 --group-size 2 --slots 2'",),
    "ci tests": (  # those for which the kernel and its cgroups matter
        f"{_PYTEST} -k 'local and not image' tests/security/test_leftovers.py tests/security/test_neighbours.py",
    ),
    "cluster images": (f"{_PYTEST} tests/nomad/test_image_slots.py",),
    "cluster storage": ("modprobe loop", f"{_PYTEST} tests/nomad/test_image_storage.py"),
    "kept": (  # each in a login session of its own
        f"( {_BEGIN} )",
        f"{_AGENTENV} exec -- echo hi",
        f"{_AGENTENV} status --json | grep '\"id\":' >/tmp/before && pkill -KILL -f 'agentenv up --slot[s]'",
        f"( {_BEGIN} )",
        f"{_AGENTENV} status --json | grep '\"id\":' | diff /tmp/before -",
        f"{_AGENTENV} exec -- echo hi",
        f"{_AGENTENV} down && ! pgrep -f agentenv.sandbox.serv[e]",
    ),
}
"""Commands that must succeed, one after another, and print no traceback."""
_CHECKS: Final = ("proofs", "services", *_LINES)
_NODES_TESTS: Final = "tests/nomad/test_two_nodes.py"
_TESTS: Final = (
    "tests/security/test_leftovers.py tests/security/test_neighbours.py tests/unit/doctor tests/unit/sandbox/supervisor"
)


class Trial:
    """One row on a machine that runs: what was found, and what of it is wrong."""

    def __init__(self, machine: Machine, row: Row, log: Path, long: frozenset[str]) -> None:
        self._machine = machine
        self._row = row
        self._log = log
        self._long = long & row.long
        self.found: dict[str, Any] = {"row": row.name}
        self.wrong: list[str] = []

    def run(self) -> None:
        """Everything of the row; the machine's rules are as before at the end."""
        begun = self._as_root(self._row.before, "before")
        if begun:
            self.wrong.append(f"the row could not be set up: {begun}")
            return
        try:
            self._judge("doctor", "exec", self._row.outcome)
            if self._row.cured is not None:
                self._cure(self._row.cured)
            self._tried()
        finally:
            self._as_root(self._row.after, "after")

    def _judge(self, doctor: str, execute: str, outcome: Outcome) -> None:
        """What doctor says, and what then happens: both must be ``outcome``."""
        code, text = self._run(agentenv(self._row, "doctor --json"), 900)
        try:
            findings = json.loads(text[text.index("{") :])["findings"]
        except ValueError:
            self.found[doctor], findings = f"ended with {code}", []
        else:
            self.found[doctor] = _verdict(one["level"] for one in findings if one["name"] != _OF_IMAGES)
        self.found["images"] = next((one["detail"].split("\n")[0] for one in findings if one["name"] == _OF_IMAGES), "")
        if self.found[doctor] != outcome:
            self.wrong.append(f"{doctor}: {self.found[doctor]}, not {outcome}")
        code, text = self._run(agentenv(self._row, "exec -- echo hi"), 600)
        works = code == 0 and text.splitlines()[-1:] == ["hi"]
        self.found[execute] = "works" if works else " ".join(text.split())[:400]
        if works == (outcome == "refused"):
            self.wrong.append(f"{execute}: {self.found[execute]!r}, and doctor said {self.found[doctor]}")

    def _cure(self, outcome: Outcome) -> None:
        """The commands that doctor names, run by root as they stand; then everything again."""
        _, commands = self._run(agentenv(self._row, "doctor --cure --no-start"), 300)
        self.found["cure"] = commands.strip()
        if problem := self._as_root(commands, "the cure"):
            self.wrong.append(f"the cure ends with an error: {problem}")
        self._judge("doctor, cured", "exec, cured", outcome)

    def _tried(self) -> None:
        if "proofs" in self._long:
            self._checked("proofs", "hosts.inside")
        if "services" in self._long:
            self._checked("services", "hosts.services")
            self._machine.restart()
            self._checked("services", "hosts.services --booted")
        if "demo" in self._long:
            self.found["demo"] = self._ran("make demo")
        if "tests" in self._long:
            code, text = self._run(command(self._row, f"{_PYTEST} -k 'not nomad' {_TESTS}"), 3600)
            self.found["tests"] = text.strip().splitlines()[-1] if text.strip() else f"ended with {code}"
            if code:
                self.wrong.append(f"tests: {self.found['tests']}")
        for name, lines in _LINES.items():
            if name in self._long:
                self.found[name] = {line: self._ran(line) == "works" for line in lines}

    def _ran(self, line: str) -> str:
        """What came of a command, which is wrong where it printed a traceback, too."""
        code, text = self._run(command(self._row, line), 7200)
        if code == 0 and "Traceback" not in text:
            return "works"
        self.wrong.append(f"{line}: {text[-600:]}")
        return f"ended with {code}"

    def _checked(self, name: str, module: str) -> None:
        """What a module of checks says in the guest."""
        _, text = self._run(command(self._row, f"{disk.AT}/.venv/bin/python -m {module}"), 3600)
        checks = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        self.found[name] = self.found.get(name, {}) | {one["check"]: one["held"] for one in checks}
        self.wrong += [f"{one['check']}: {one['seen']}" for one in checks if not one["held"]]
        if not checks:
            self.wrong.append(f"{module} has checked nothing: {text[-400:]}")

    def _run(self, line: str, seconds: float) -> tuple[int, str]:
        within_s = seconds * self._machine.time_factor / 2
        done = self._logged(f"$ {line}   # {self._row.name}; {self._row.user}", line, self._row.user, within_s)
        return done.code, done.output

    def _as_root(self, line: str, what: str) -> str:
        """Empty, or how it failed."""
        done = self._logged(f"# {what}: {line}", line, "root", 600)
        return "" if done.code == 0 else f"{done.code}: {done.output[-400:]}"

    def _logged(self, title: str, line: str, user: str, within_s: float) -> Done:
        with self._log.open("a") as log:
            log.write(f"\n{title}\n")
        done = self._machine.run(line, user=user, within_s=within_s, log=self._log)
        with self._log.open("a") as log:
            log.write(f"# {done.seconds:.0f} s; {done.code}\n")
        return done


def _verdict(levels: Iterable[str]) -> Outcome:
    found = set(levels)
    return "refused" if "broken" in found else "weaker" if "weaker" in found else "full"


def trials(guest: str, wanted: Sequence[str], long: frozenset[str]) -> Iterator[Trial]:
    """Every row that is wanted, on machines booted as they need."""
    rows = [row for row in ROWS if guest in row.suites and any(part in row.name for part in wanted)]
    began = time.monotonic()
    made = disk.made(GUESTS[guest], whole=not long <= set(_OF_CI) or any(disk.SANDBOX in row.before for row in rows))
    print(f"{guest}: its disk is {made.image} ({time.monotonic() - began:.0f} s)", flush=True)
    if not accelerated(made.kernel):
        print("no KVM works on this machine: guests are emulated, 10 to 20 times slower", flush=True)
    log = OUT / f"{guest}.log"
    log.unlink(missing_ok=True)
    for kernel, of_boot in itertools.groupby(rows, key=lambda row: row.kernel):
        began = time.monotonic()
        with Machine(made, (OUT / f"{guest}.console").resolve(), kernel) as machine:
            said = machine.run("uname -r; python3 --version").output.split("\n")
            print(f"{guest}: {said[0]}, {said[1]}; booted in {time.monotonic() - began:.0f} s {kernel}", flush=True)
            for row in of_boot:
                trial = Trial(machine, row, log, long)
                began = time.monotonic()
                trial.run()
                told = "as it should be" if not trial.wrong else "; ".join(trial.wrong)
                print(f"{guest}: {row.name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
                yield trial


def two_nodes(guest: str) -> bool:
    """Two machines of this guest as the nodes of a cluster: whether the tests with such nodes pass."""
    began = time.monotonic()
    factor = 1 if accelerated(disk.made(GUESTS[guest]).kernel) else 10
    environment = {**os.environ, NODES_GUEST: guest, TIME_FACTOR: str(factor)}
    with (OUT / f"{guest}.nodes.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, *_PYTEST.split()[1:], "-v", "-n", "0", _NODES_TESTS],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False,
        )  # fmt: skip
    told = "as it should be" if done.returncode == 0 else f"see {log.name}"
    print(f"{guest}: {_TWO_NODES}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    return done.returncode == 0


def table(found: dict[str, list[Trial]]) -> str:
    """For docs/hosts.md."""
    lines = [
        f"| host | row | doctor | a slot | images | after the cure | {' | '.join(_CHECKS)} | demo | tests |",
        f"|{'---|' * (8 + len(_CHECKS))}",
    ]
    for guest, of_guest in found.items():
        for trial in of_guest:
            seen = trial.found
            held = [f"{sum(seen[one].values())} of {len(seen[one])}" if one in seen else "" for one in _CHECKS]
            cells = [
                guest, seen["row"], seen.get("doctor", ""), "works" if seen.get("exec") == "works" else "refused",
                seen.get("images", ""),
                seen.get("exec, cured", ""), *held, seen.get("demo", ""), seen.get("tests", ""),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m hosts", description=__doc__)
    parser.add_argument("guests", nargs="*", metavar="GUEST", help=f"of {', '.join(GUESTS)} (default: all)")
    parser.add_argument("--row", action="append", metavar="TEXT", help="only rows whose name has TEXT; repeatable")
    parser.add_argument(
        "--only", default=_LONG, help=f"of the long checks (default: {_LONG}; also: {', '.join(_OF_CI)})"
    )
    given = parser.parse_args()
    if unknown := set(given.guests) - set(GUESTS):
        parser.error(f"there is no guest {min(unknown)}; there are {', '.join(GUESTS)}")
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        parser.error(f"{', '.join(missing)} cannot be found: scripts/system-packages hosts")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no machine is left running
    OUT.mkdir(parents=True, exist_ok=True)
    long = frozenset(given.only.split(","))
    guests, rows = given.guests or list(GUESTS), given.row or [""]
    found = {guest: list(trials(guest, rows, long)) for guest in guests}
    (OUT / "found.json").write_text(
        json.dumps({guest: [one.found | {"wrong": one.wrong} for one in of] for guest, of in found.items()}, indent=1)
    )
    (OUT / "table.md").write_text(table(found))
    print((OUT / "table.md").read_text())
    of_nodes = [two_nodes(guest) for guest in guests if _TWO_NODES in long and any(row in _TWO_NODES for row in rows)]
    return 0 if all(of_nodes) and not any(trial.wrong for of_guest in found.values() for trial in of_guest) else 1


if __name__ == "__main__":
    sys.exit(main())
