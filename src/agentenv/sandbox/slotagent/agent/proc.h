/* What our /proc shows of the processes of the slot, and which of them we are. */
#ifndef PROC_H
#define PROC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* More processes than a slot may ever have; memory that is never touched costs nothing. */
enum { MAX_PROCESSES = 16384, MAX_TRACERS = 1024 };

/* Opens /proc, which everything below reads. False when there is none, or when it shows another pid namespace than
 * ours: its pids would be those of other processes. */
bool open_proc(void);

/* Known once open_proc has succeeded. */
pid_t own_pid(void);
bool is_init(void);

/* The pid that a text of digits names, or 0. */
pid_t parse_pid(const char *text);

struct process {
    pid_t pid, parent, session, group;
    uint64_t started; /* in clock ticks since boot */
    bool dead, stopped;
    bool async;         /* a copy of a shell that runs a list in the background */
    bool sent;          /* the caller's signal: set by the caller, carried over from one scan to the next */
    signed char member; /* the caller's answer about this process; -1 after a scan */
};

/* In order of pid. */
struct table { struct process at[MAX_PROCESSES]; size_t count; };

/* Lists all processes, our children last: orphans become children of ours, as the newest ones. `before` is an earlier
 * scan, or NULL: it tells which of them were sent the signal already. Returns how many children we had when they were
 * listed; -1 when this kernel does not say. */
long scan(struct table *now, const struct table *before);
struct process *find_process(struct table *table, pid_t pid);

/* How many children we have, the dead ones that were not reaped included; -1 when this kernel does not say. */
long count_children(void);

bool is_stopped(pid_t pid);

/* Adds to `found`, which has room for MAX_TRACERS, each process but us that traces a thread of `pid` and is not in
 * it yet. Returns the new count. */
size_t add_tracers(pid_t pid, pid_t *found, size_t count);

#endif
