/* Which processes belong to a run, and what is done to them: docs/slot-agent.md, "What belongs to a run". */
#ifndef TREE_H
#define TREE_H

#include "runs.h"

#include <stddef.h>
#include <stdint.h>

/* Kills the tree of a run, or (NULL) everything but us (where we are not init, all that descends from us), and waits
 * until it is dead, for a limited time. Returns how many processes were killed. */
size_t kill_processes(const struct run *run);

/* Signals the run's process group, but neither what was in it before the tick `since`, nor what its shell has begun
 * in the background since then. */
void signal_foreground(const struct run *of, int number, uint64_t since);

/* Stops every process but us, so that none can fork or signal any more; only a child that is just being forked may come
 * afterwards, and calling it again stops that too. thaw_slot continues all that were stopped here. */
void freeze_slot(void);
void thaw_slot(void);

#endif
