"""What is tried on a guest: as whom, in which session, under which rules of the machine, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from agentenv import apparmor
from hosts.disk import AT, SANDBOX

Long = Literal[
    "proofs",
    "services",
    "demo",
    "tests",
    "nomad",
    "nomad demo",
    "cluster images",
    "cluster storage",
    "kept",
    "ci demo",
    "ci tests",
]
"""What slots promise (:mod:`hosts.inside`), ops/systemd (:mod:`hosts.services`), `make demo`, a part of the tests,
a Nomad cluster over a Docker engine, the demo on it, image slots on such a one (which before Linux 6.6 have only
storage on a disk), a farm whose service is killed and started again, and what there is time for in each run of
.ci/run."""
Outcome = Literal["full", "weaker", "refused"]
"""Of `agentenv exec`: slots run and nothing is weaker; they run, and something is; they do not."""

_DENIED: Final = """cat >/etc/apparmor.d/agentenv-hosts <<'END'
abi <abi/{abi}>,
include <tunables/global>
profile agentenv-hosts {program} flags=(attach_disconnected) {{
  {rules}
}}
END
apparmor_parser --replace /etc/apparmor.d/agentenv-hosts"""
_NO_NAMESPACES: Final = f"allow all,\n  audit deny userns,\n  change_profile -> {apparmor.PROFILE},"
_CONFINED: Final = _DENIED.format(program="", abi="4.0", rules=_NO_NAMESPACES)
_IN_IT: Final = "aa-exec -p agentenv-hosts --"
_ALLOWED: Final = "apparmor_parser --remove /etc/apparmor.d/agentenv-hosts; rm /etc/apparmor.d/agentenv-hosts"
_DOCKER: Final = f"systemctl start docker && docker load --quiet --input {SANDBOX}"
_NO_DOCKER: Final = "systemctl stop docker docker.socket containerd"
_UNIT: Final = "systemd-run --pipe --wait --quiet --collect -E AGENTENV_TIME_FACTOR -E AGENTENV_ISOLATION"
_SCOPE: Final = "systemd-run --user --scope --quiet"
_CGROUP_V1: Final = "systemd.unified_cgroup_hierarchy=0 SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1"
"""systemd 256 and 257 need the second; 258 has no cgroup v1."""


@dataclass(frozen=True)
class Row:
    """``within``: the command in front of everything. ``before`` and ``after``: commands of root. ``kernel``: more
    words of its command line. ``outcome``: what must come of it; ``cured``: what must, once every command that doctor
    names has been run (None: it names none). ``long``: which of the long checks it has."""

    name: str
    outcome: Outcome
    user: str = "root"
    within: str = ""
    before: str = "true"
    after: str = "true"
    kernel: str = ""
    cured: Outcome | None = None
    long: frozenset[Long] = frozenset()
    suites: frozenset[str] = frozenset({"bookworm", "trixie", "forky"})


ROWS: Final = (
    Row("root, over ssh", "full", long=frozenset({"proofs", "services", "demo", "tests", "ci demo"})),
    Row("root, Docker and Nomad", "full", before=_DOCKER, after=_NO_DOCKER, long=frozenset({"nomad", "nomad demo"})),
    Row(
        "root, images on Docker and Nomad",
        "full",
        before=_DOCKER,
        after=_NO_DOCKER,
        long=frozenset({"cluster images", "cluster storage"}),
        suites=frozenset({"trixie", "forky"}),
    ),
    Row(
        "root, images on a disk on Docker and Nomad",
        "full",
        before=_DOCKER,
        after=_NO_DOCKER,
        long=frozenset({"cluster storage"}),
        suites=frozenset({"bookworm"}),
    ),
    Row(
        "root, Docker with userns-remap",
        "full",
        before=f"""mkdir -p /etc/docker; echo '{{"userns-remap": "default"}}' >/etc/docker/daemon.json; {_DOCKER}""",
        after=f"{_NO_DOCKER}; rm /etc/docker/daemon.json",
        long=frozenset({"nomad"}),
    ),
    Row("root, a unit with Delegate=yes", "full", within=f"{_UNIT} -p Delegate=yes"),
    Row("root, a unit without", "weaker", within=_UNIT),
    Row(
        "subordinate ids, a delegated scope",
        "full",
        user="ann",
        within=f"{_SCOPE} -p Delegate=yes",
        long=frozenset({"proofs", "demo", "tests", "ci tests"}),
    ),
    Row("subordinate ids, plain", "full", user="ann", long=frozenset({"kept"})),
    Row(
        "subordinate ids, lingering",
        "full",
        user="ann",
        before="loginctl enable-linger ann",
        after="loginctl disable-linger ann",
        long=frozenset({"kept"}),
    ),
    Row(
        "no subordinate ids, plain",
        "refused",
        user="bob",
        after="usermod --del-subuids 1-999999999 --del-subgids 1-999999999 bob",
        cured="full",
    ),
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
        "full",
        before="sysctl -qw kernel.unprivileged_userns_clone=0",
        after="sysctl -qw kernel.unprivileged_userns_clone=1",
    ),
    Row(
        "subordinate ids, kernel.unprivileged_userns_clone=0",
        "refused",
        user="ann",
        within=f"{_SCOPE} -p Delegate=yes",
        before="sysctl -qw kernel.unprivileged_userns_clone=0",
        after="sysctl -qw kernel.unprivileged_userns_clone=1",
        cured="full",
    ),
    Row(
        "root, AppArmor denies bwrap user namespaces",
        "full",
        before=_DENIED.format(program="/usr/bin/bwrap", abi="4.0", rules=_NO_NAMESPACES),
        after=_ALLOWED,
        suites=frozenset({"trixie", "forky"}),
    ),
    Row(
        "subordinate ids, AppArmor denies user namespaces",
        "refused",
        user="ann",
        within=_IN_IT,
        before=_CONFINED,
        after=_ALLOWED,
        suites=frozenset({"trixie", "forky"}),
    ),
    Row(
        "subordinate ids, the same with the profile that doctor names for Ubuntu",
        "full",
        user="ann",
        within=_IN_IT,
        before=f"{_CONFINED}; {apparmor.install_command()}",
        after=f"{_ALLOWED}; apparmor_parser --remove {apparmor.FILE}; rm {apparmor.FILE}",
        suites=frozenset({"trixie", "forky"}),
    ),
    Row(
        "root, AppArmor denies bwrap capabilities",
        "refused",
        before=_DENIED.format(
            program="/usr/bin/bwrap", abi="3.0", rules="file,\n  mount,\n  umount,\n  pivot_root,\n  signal,\n  unix,"
        ),
        after=_ALLOWED,
    ),
    Row("root, cgroup v1", "full", kernel=_CGROUP_V1, suites=frozenset({"bookworm"})),
    # Its kernel has no memory controller of cgroup v1.
    Row("root, cgroup v1 without memory", "weaker", kernel=_CGROUP_V1, suites=frozenset({"trixie"})),
)


def command(row: Row, what: str) -> str:
    """To run ``what``, words of a shell, as the row says."""
    return f"cd {AT} && {row.within} {what}"


def agentenv(row: Row, arguments: str) -> str:
    """To run `agentenv` with these arguments."""
    return command(row, f"{AT}/.venv/bin/agentenv {arguments}")
