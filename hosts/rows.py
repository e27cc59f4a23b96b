"""What is tried on a guest: as whom, in which session, under which rules of the machine, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hosts.disk import AT

Outcome = Literal["full", "weaker", "refused"]
"""Of `agentenv exec`: slots run and nothing is weaker; they run, and something is; they do not."""

_DENIED: Final = """cat >/etc/apparmor.d/agentenv-hosts <<'END'
abi <abi/{abi}>,
include <tunables/global>
profile agentenv-hosts /usr/bin/bwrap {{
  {rules}
}}
END
apparmor_parser --replace /etc/apparmor.d/agentenv-hosts"""
_ALLOWED: Final = "apparmor_parser --remove /etc/apparmor.d/agentenv-hosts; rm /etc/apparmor.d/agentenv-hosts"
_UNIT: Final = "systemd-run --pipe --wait --quiet --collect -E AGENTENV_TIME_FACTOR -E AGENTENV_ISOLATION"
_SCOPE: Final = "systemd-run --user --scope --quiet"


@dataclass(frozen=True)
class Row:
    """``within``: the command in front of everything. ``before`` and ``after``: commands of root. ``kernel``: more
    words of its command line. ``outcome``: what must come of it; ``cured``: what must, once every command that doctor
    names has been run (None: it names none). ``by_name``: what is weaker has to be accepted by name, as doctor says,
    and `agentenv exec` does not. ``full``: also the long checks (the proofs, the demo, tests)."""

    name: str
    outcome: Outcome
    user: str = "root"
    within: str = ""
    before: str = "true"
    after: str = "true"
    kernel: str = ""
    cured: Outcome | None = None
    by_name: bool = False
    full: bool = False
    suites: frozenset[str] = frozenset({"bookworm", "trixie", "backports"})


ROWS: Final = (
    Row("root, over ssh", "full", full=True),
    Row("root, a unit with Delegate=yes", "full", within=f"{_UNIT} -p Delegate=yes"),
    Row("root, a unit without", "weaker", within=_UNIT),
    Row("subordinate ids, a delegated scope", "full", user="ann", within=f"{_SCOPE} -p Delegate=yes", full=True),
    Row("subordinate ids, plain", "weaker", user="ann"),
    Row("no subordinate ids, plain", "weaker", user="bob", by_name=True),
    Row("no subordinate ids, isolation=user", "weaker", user="bob", within="env AGENTENV_ISOLATION=user"),
    Row(
        "a slice with MemoryMax and TasksMax",
        "full",
        within=f"{_UNIT} -p Delegate=yes --slice=small.slice",
        before="systemctl set-property --runtime small.slice MemoryMax=2G TasksMax=800",
    ),
    Row(
        "root, user.max_user_namespaces=0",
        "refused",
        before="sysctl -qw user.max_user_namespaces=0",
        after="sysctl -qw user.max_user_namespaces=15000",
        cured="full",
    ),
    Row(
        "root, kernel.unprivileged_userns_clone=0",
        "refused",
        before="sysctl -qw kernel.unprivileged_userns_clone=0",
        after="sysctl -qw kernel.unprivileged_userns_clone=1",
        cured="full",
    ),
    Row(
        "root, AppArmor denies bwrap user namespaces",
        "refused",
        before=_DENIED.format(abi="4.0", rules="allow all,\n  audit deny userns,"),
        after=_ALLOWED,
        suites=frozenset({"trixie", "backports"}),
    ),
    Row(
        "root, AppArmor denies bwrap capabilities",
        "refused",
        before=_DENIED.format(abi="3.0", rules="file,\n  mount,\n  umount,\n  pivot_root,\n  signal,\n  unix,"),
        after=_ALLOWED,
    ),
    Row("root, cgroup v1", "full", kernel="systemd.unified_cgroup_hierarchy=0", suites=frozenset({"bookworm"})),
)


def command(row: Row, what: str) -> str:
    """To run ``what``, words of a shell, as the row says."""
    return f"cd {AT} && {row.within} {what}"


def agentenv(row: Row, arguments: str) -> str:
    """To run `agentenv` with these arguments."""
    return command(row, f"{AT}/.venv/bin/agentenv {arguments}")
