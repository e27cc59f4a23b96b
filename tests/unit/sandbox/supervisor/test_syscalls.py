"""What system calls do beside what they are for."""

from __future__ import annotations

import os
import signal

from agentenv.sandbox.supervisor import syscalls


def test_using_files_as_another_keeps_the_signal_of_the_parents_death() -> None:
    """Without it a container outlives its launcher. In a process of its own, because the signal is one's parent's."""
    pid = os.fork()
    if pid == 0:
        syscalls.die_with_parent(signal.SIGKILL)
        with syscalls.file_access_as(1234 if os.geteuid() == 0 else os.geteuid()):
            pass
        os._exit(syscalls.parent_death_signal())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == signal.SIGKILL
