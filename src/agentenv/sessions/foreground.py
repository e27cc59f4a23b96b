"""Determines what a session's shell and its program are waiting for, as reported by the slot's kernel.

A small program inside the slot checks this, because the kernel shows what a process sleeps in only to its own user,
and because querying a terminal of the slot from outside may block on programs in the slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.sessions.host import Host
from agentenv.sessions.run_once import output_of

_PTS_MAJOR = 136
_LOOK_S = 2.0
_PROBE = r"""
pipe=$1 number=$2 tty=/dev/pts/$3 group=$4
exec 2>/dev/null
[[ $pipe ]] && while read -r inode input; do
  [[ $inode == "$pipe" && -p $input ]] && { read -t 0 <"$input" || echo idle; break; }
done < <(stat -L -c "%i %n" /proc/[0-9]*/fd/0)
if [[ $group ]]; then
  read -r -d '' text <"/proc/$group/stat"
  [[ $text == *") "[!ZX]* ]] || { echo ended; exit 0; }
fi
[[ $number ]] || exit 0
set -f

is_terminal() { [[ $1 -ef $tty || $1 -ef /dev/tty ]]; }

# Asleep in a read, which for a terminal ends in wait_woken: of this terminal, when the kernel says which
# descriptor; where it keeps that to itself (yama), of nothing else that sleeps there.
in_read() {
  local call fd
  if read -r call fd _ <"$2/syscall" && [[ $fd == 0x* ]]; then is_terminal "$1/fd/$((fd))"; return; fi
  local info
  set +f; local all=("$1"/fdinfo/*); set -f
  for info in "${all[@]}"; do
    [[ -S $1/fd/${info##*/} ]] && return 1
    read -r -d '' text <"$info"; [[ $text == *notify* ]] && return 1
  done
  is_terminal "$1/fd/0"
}

# Asleep until one of several things happens, one of which is a key: it has switched line mode off.
in_poll() { is_terminal "$1/fd/0" && [[ $(stty -a <"$tty") == *" -icanon"* ]]; }

set +f; stats=(/proc/[0-9]*/stat); set -f
for stat in "${stats[@]}"; do
  read -r -d '' text <"$stat"
  fields=(${text##*)})
  [[ ${fields[4]} == "$number" && ${fields[2]} == "${fields[5]}" ]] || continue
  [[ ${fields[2]} == "${group:-${fields[2]}}" ]] || continue
  process=${stat%/stat}
  set +f; tasks=("$process"/task/*); set -f
  for task in "${tasks[@]:0:64}"; do
    read -r wchan <"$task/wchan"
    case $wchan in
      wait_woken|n_tty_read|tty_read) in_read "$process" "$task" ;;
      poll_schedule_timeout*|do_select*|do_sys_poll*|do_epoll_wait*|ep_poll*) in_poll "$process" ;;
      *) false ;;
    esac && { echo reads; exit 0; }
  done
done
exit 0
"""


@dataclass(frozen=True)
class Waits:
    """What was observed."""

    input: bool = False
    """A foreground process of the terminal is blocked until something is typed."""
    commands: bool = False
    """The shell is reading commands, has read all there are, and runs none."""
    ended: bool = False
    """The leader of the process group has ended."""


async def seen(
    host: Host, *, commands: int | None = None, terminal: int | None = None, group: int | None = None
) -> Waits | None:
    """Check the shell that reads its commands from the pipe with inode ``commands``, and the foreground of
    ``/dev/pts/N`` of the slot for ``terminal`` N: of any process group, or of ``group`` alone. Takes some milliseconds
    of the slot's time. None when it took longer than 2 s: nothing is known then."""
    number = ""
    if terminal is not None:
        number = str((_PTS_MAJOR << 8) | (terminal & 0xFF) | ((terminal & ~0xFF) << 12))
    asked = ["" if value is None else str(value) for value in (commands, number, terminal, group)]
    said = await output_of(host, "bash", "-c", _PROBE, "bash", *asked, longest_s=_LOOK_S)
    if said is None:
        return None
    words = said.split()
    return Waits(input=b"reads" in words, commands=b"idle" in words, ended=b"ended" in words)
