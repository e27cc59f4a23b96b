/* The system calls that no process of a slot may use, wherever the slot runs: docs/isolation.md says why. */
#ifndef GUARD_H
#define GUARD_H

#include <stdbool.h>
#include <sys/types.h>

/* From here on the calls of the table in guard.c are refused, to us and to everything that we start. `agent` is our
 * pid: some calls are refused only when they are about it. `may_gain`: an exec may still give privileges (setuid),
 * for which we need CAP_SYS_ADMIN. False when that cannot be had. */
bool guard_slot(pid_t agent, bool may_gain);

/* For `slotagent prove`, a command inside a slot: tries every call of the table, prints a line `allowed NAME` for each
 * that was not refused, then `refused COUNT`. Returns an exit code. */
int prove_guard(void);

#endif
