/* The runs: the processes that the server has started, and those of them that have ended. */
#ifndef RUNS_H
#define RUNS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_RUNS = 512 };

/* A run is led by its first process. Times are clock ticks since boot, as in /proc/PID/stat; between processes of the
 * same tick the pids tell the order. */
struct run { uint32_t id; pid_t pid; uint64_t started; };
struct ended_run { pid_t pid; uint64_t started, ended; };

uint64_t ticks_now(void);

/* There are never more than MAX_RUNS: the caller sees to that. */
void remember_run(uint32_t id, pid_t pid, uint64_t started);

/* The run led by `pid` has ended: it is no run any more, but one that is remembered for a while as ended. False when
 * `pid` leads none; else *id is its number. */
bool end_run(pid_t pid, uint32_t *id);

/* NULL when there is none. */
const struct run *find_run(uint32_t id);

bool leads_run(pid_t pid);

/* For each run, and each that is remembered as ended: the first one after NULL, NULL after the last one. */
const struct run *next_run(const struct run *run);
const struct ended_run *next_ended_run(const struct ended_run *run);

#endif
