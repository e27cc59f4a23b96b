/* The system calls that no process of a slot may use, wherever the slot runs: docs/isolation.md says why. */
#ifndef GUARD_H
#define GUARD_H

#include <stdbool.h>
#include <sys/types.h>

struct guard {
    bool may_gain;      /* an exec may still give privileges (setuid), for which we need CAP_SYS_ADMIN */
    bool nested;        /* programs of the slot may make user namespaces, and mounts and filters in those */
    bool packets;       /* sockets that see every packet of the slot's interfaces, and programs of sockets */
    bool net_admin;     /* sockets that set packet filters of the slot's network namespace */
};

/* From here on no calls but those of call_list.h are allowed to us and to everything that we start, and of these not what
 * the tables in guard.c refuse; nor those of another machine type (i386, x32). `agent` is our
 * pid: some calls are refused only when they are about it. False when that cannot be had. */
bool guard_slot(pid_t agent, const struct guard *guard);

/* For `slotagent prove`, a command inside a slot: tries every call of the table, prints a line `allowed NAME` for each
 * that was not refused, then `refused COUNT`. Returns an exit code. */
int prove_guard(void);

#endif
