"""Writes the list of system calls that a slot may use, from the seccomp profile of the container:

    python -m agentenv.sandbox.slotagent.call_list docker/seccomp.json

The profile follows Docker's. So a slot may use the same calls wherever it runs, also where no container's filter is
around it. The list is kept as C (``guard/call_list.c``), and a test compares the two: the programs are compiled where
there is no ``docker/`` (an installed wheel, an image), by a compiler that knows the numbers of its machine type.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

SOURCE: Final = Path(__file__).resolve().parent / "guard/call_list.c"
FOR_SLOTS: Final = frozenset({"chroot", "clone", "unshare"})
"""Of the calls that the container needs beyond Docker's list, those that slots may use; guard.c looks at arguments."""
IN_NESTED: Final = frozenset({"mount", "pivot_root", "sethostname", "setns", "umount2"})
"""Also those, where programs of the slot may make user namespaces."""
JUDGED: Final = frozenset({"personality", "socket"})
"""Calls that the profile allows with certain arguments only; guard.c has its own rules, which also allow a personality
without random addresses."""
_SLOTS_COMMENT: Final = "container of slots"


def names(profile: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The calls of every slot, and those that are added where user namespaces may be made."""
    allowed: set[str] = set(JUDGED)
    for rule in profile["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args"):
            own = _SLOTS_COMMENT in rule.get("comment", "")
            allowed.update(FOR_SLOTS.intersection(rule["names"]) if own else rule["names"])
    return sorted(allowed), sorted(IN_NESTED)


def source(profile: Mapping[str, Any]) -> str:
    """The text of the C file. A call that the machine type or its headers do not have is left out."""
    listed, nested = names(profile)
    return (
        "/* Written by agentenv.sandbox.slotagent.call_list from docker/seccomp.json: change that. */\n"
        '#include "call_list.h"\n\n#include <sys/syscall.h>\n\n'
        f"bool is_listed(long number, bool nested) {{\n    switch (number) {{\n{_cases(listed)}        return true;\n"
        f"{_cases(nested)}        return nested;\n    default:\n        return false;\n    }}\n}}\n"
    )


def _cases(calls: Iterable[str]) -> str:
    return "".join(f"#ifdef SYS_{name}\n    case SYS_{name}:\n#endif\n" for name in calls)


if __name__ == "__main__":
    SOURCE.write_text(source(json.loads(Path(sys.argv[1]).read_text())))
