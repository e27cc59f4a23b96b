"""The start of a tmux session while tmux's own server exits."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from agentenv.wire.sessions import TmuxArguments, TmuxReply
from tests.unit.sessions.session_box import BoxSessions


async def test_a_session_nobody_owns_is_replaced_though_its_server_exits_with_it(tmp_path: Path) -> None:
    workspace, programs = tmp_path / "workspace", tmp_path / "bin"
    workspace.mkdir()
    programs.mkdir()
    # The client that comes right after the end of the left session meets the server as it exits.
    (programs / "tmux").write_text(
        f"""#!/bin/sh
        case "$*" in *kill-session*) touch {tmp_path}/exits;; *)
            if [ -e {tmp_path}/exits ] && ! [ -e {tmp_path}/met ]; then
                touch {tmp_path}/met
                echo "server exited unexpectedly" >&2
                exit 1
            fi;; esac
        exec /usr/bin/tmux "$@"
        """
    )
    (programs / "tmux").chmod(0o755)
    sessions = BoxSessions(workspace, {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(workspace)}, 1024 * 1024)
    left = ["-S", f"{workspace}.tmux", "-f", "/dev/null", "new-session", "-d", "-s", "left"]
    subprocess.run(["/usr/bin/tmux", *left], check=True)
    call = sessions.call(TmuxArguments(action="start", session="left"), asyncio.get_running_loop().time() + 30)
    answer = await asyncio.wait_for(call, 40)
    subprocess.run(["/usr/bin/tmux", "-S", f"{workspace}.tmux", "kill-server"], check=False)
    sessions.close()
    assert isinstance(answer.content, TmuxReply)
    assert answer.content.session is not None
    assert answer.content.session.state == "running", answer.fields
    assert (tmp_path / "met").exists()
