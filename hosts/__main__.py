"""``make hosts`` (``GUEST=bookworm``): boot each guest, try every row on it, and print what came of it.

As root, with QEMU; without a processor that runs guests (KVM) they are emulated, and everything takes 10 to 20 times as
long. Everything printed by the guests is kept in out/hosts/; the table for docs/hosts.md is out/hosts/table.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hosts import disk
from hosts.guests import GUESTS
from hosts.machine import Machine, accelerated
from hosts.rows import ROWS, Outcome, Row, agentenv, command

OUT: Final = Path("out/hosts")
_PROGRAMS: Final = ("qemu-system-x86_64", "mmdebstrap", "ssh", "mkfs.ext4")
_OF_IMAGES: Final = "slots with images"
"""doctor's finding about them; they need more of a kernel than others, which is a column of its own."""
_TESTS: Final = (
    "tests/security/test_leftovers.py tests/security/test_neighbours.py tests/unit/doctor tests/unit/sandbox/supervisor"
)


class Trial:
    """One row on a machine that runs: what was found, and what of it is wrong."""

    def __init__(self, machine: Machine, row: Row, log: Path, long: frozenset[str]) -> None:
        self._machine = machine
        self._row = row
        self._log = log
        self._long = long if row.full else frozenset()
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
        if works == (outcome == "refused" or self._row.by_name):
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
            _, text = self._run(command(self._row, f"{disk.AT}/.venv/bin/python -m hosts.inside"), 3600)
            proofs = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            self.found["proofs"] = {one["check"]: one["held"] for one in proofs}
            self.wrong += [f"{one['check']}: {one['seen']}" for one in proofs if not one["held"]]
            if not proofs:
                self.wrong.append(f"no proof was made: {text[-400:]}")
        if "demo" in self._long:
            code, text = self._run(command(self._row, "make demo"), 7200)
            self.found["demo"] = "works" if code == 0 and "Traceback" not in text else f"ended with {code}"
            if self.found["demo"] != "works":
                self.wrong.append(f"make demo: {text[-600:]}")
        if "tests" in self._long:
            pytest = f"{disk.AT}/.venv/bin/python -m pytest --color=no -q -p no:cacheprovider -k 'not nomad' {_TESTS}"
            code, text = self._run(command(self._row, pytest), 3600)
            self.found["tests"] = text.strip().splitlines()[-1] if text.strip() else f"ended with {code}"
            if code:
                self.wrong.append(f"tests: {self.found['tests']}")

    def _run(self, line: str, seconds: float) -> tuple[int, str]:
        done = self._machine.run(line, user=self._row.user, within_s=seconds * self._machine.time_factor / 2)
        with self._log.open("a") as log:
            log.write(f"\n$ {line}   # {self._row.name}; {self._row.user}; {done.seconds:.0f} s; {done.code}\n")
            log.write(done.output)
        return done.code, done.output

    def _as_root(self, line: str, what: str) -> str:
        """Empty, or how it failed."""
        done = self._machine.run(line)
        with self._log.open("a") as log:
            log.write(f"\n# {what}: {line}\n{done.output}")
        return "" if done.code == 0 else f"{done.code}: {done.output[-400:]}"


def _verdict(levels: Iterable[str]) -> Outcome:
    found = set(levels)
    return "refused" if "broken" in found else "weaker" if "weaker" in found else "full"


def trials(guest: str, wanted: Sequence[str], long: frozenset[str]) -> Iterator[Trial]:
    """Every row that is wanted, on machines booted as they need."""
    rows = [row for row in ROWS if guest in row.suites and any(part in row.name for part in wanted)]
    began = time.monotonic()
    made = disk.made(GUESTS[guest])
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


def table(found: dict[str, list[Trial]]) -> str:
    """For docs/hosts.md."""
    lines = [
        "| host | row | doctor | a slot | images | after the cure | proofs | demo | tests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for guest, of_guest in found.items():
        for trial in of_guest:
            seen = trial.found
            proofs = seen.get("proofs")
            held = "" if proofs is None else f"{sum(proofs.values())} of {len(proofs)}"
            cells = [
                guest, seen["row"], seen.get("doctor", ""), "works" if seen.get("exec") == "works" else "refused",
                seen.get("images", ""),
                seen.get("exec, cured", ""), held, seen.get("demo", ""), seen.get("tests", ""),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m hosts", description=__doc__)
    parser.add_argument("guests", nargs="*", metavar="GUEST", help=f"of {', '.join(GUESTS)} (default: all)")
    parser.add_argument("--row", action="append", metavar="TEXT", help="only rows whose name has TEXT; repeatable")
    parser.add_argument("--only", default="proofs,demo,tests", help="of the long checks (default: proofs,demo,tests)")
    given = parser.parse_args()
    if unknown := set(given.guests) - set(GUESTS):
        parser.error(f"there is no guest {min(unknown)}; there are {', '.join(GUESTS)}")
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        parser.error(f"{', '.join(missing)} cannot be found: scripts/system-packages hosts")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no machine is left running
    OUT.mkdir(parents=True, exist_ok=True)
    long = frozenset(given.only.split(","))
    found = {guest: list(trials(guest, given.row or [""], long)) for guest in given.guests or GUESTS}
    (OUT / "found.json").write_text(
        json.dumps({guest: [one.found | {"wrong": one.wrong} for one in of] for guest, of in found.items()}, indent=1)
    )
    (OUT / "table.md").write_text(table(found))
    print((OUT / "table.md").read_text())
    return 1 if any(trial.wrong for of_guest in found.values() for trial in of_guest) else 0


if __name__ == "__main__":
    sys.exit(main())
