"""The AppArmor profile in which an ordinary user may make user namespaces and has rights in them.

Ubuntu 24.04 and later (``kernel.apparmor_restrict_unprivileged_userns=1``) give whoever makes a namespace outside of
such a profile no right in it. Once root has loaded ours (:func:`install_command`), a process takes it by itself, as
aa-exec(1) does; what it starts has it too. Standard library only.
"""

from __future__ import annotations

import os
import shlex
from typing import Final

PROFILE: Final = "agentenv"
FILE: Final = f"/etc/apparmor.d/{PROFILE}"
_TEXT: Final = f"abi <abi/4.0>,\\nprofile {PROFILE} flags=(unconfined) {{\\n  userns,\\n}}\\n"
_ATTRIBUTE: Final = "/proc/thread-self/attr/apparmor/current"


def install_command() -> str:
    """For root: load the profile, now and at every boot."""
    return f"printf {shlex.quote(_TEXT)} >{FILE} && apparmor_parser --replace {FILE}"


def take_profile() -> bool:
    """Put the calling thread, and what it starts from here on, under the profile. False where that is not loaded, not
    needed (root), or not allowed; it is then as before."""
    if os.geteuid() == 0:
        return False
    try:
        descriptor = os.open(_ATTRIBUTE, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, f"changeprofile {PROFILE}".encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
