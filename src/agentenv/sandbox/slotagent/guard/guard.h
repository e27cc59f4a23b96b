/* The system calls that no process of a slot may use, wherever the slot runs: docs/isolation.md says why. */
#ifndef GUARD_H
#define GUARD_H

#include <stdbool.h>
#include <sys/types.h>

struct guard {
    bool may_gain;      /* an exec may still give privileges (setuid), for which we need CAP_SYS_ADMIN */
    bool listed;        /* the slot has root inside: no other calls than those of call_list.h */
    bool nested;        /* programs of the slot may make user namespaces, and mounts in those */
    bool packets;       /* sockets that see every packet of the slot's interfaces */
};

/* From here on the calls of the tables in guard.c are refused, to us and to everything that we start. `agent` is our
 * pid: some calls are refused only when they are about it. False when that cannot be had. */
bool guard_slot(pid_t agent, const struct guard *guard);

/* For `slotagent prove`, a command inside a slot: tries every call of the table, prints a line `allowed NAME` for each
 * that was not refused, then `refused COUNT`. Returns an exit code. */
int prove_guard(void);

#endif
