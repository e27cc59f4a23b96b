/* What the parts of slotagent share: the runs, and two functions on them. */
#ifndef SLOTAGENT_H
#define SLOTAGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_PACKET = 64 * 1024, MAX_RUNS = 512, MAX_ENDED = 256, SCRIPT_DESCRIPTOR = 9, PAUSE_NS = 1000 * 1000 };
enum step { STEP_RESOURCES = 1, STEP_CWD = 2, STEP_EXEC = 3 };

/* Start times are clock ticks since boot, as in /proc/PID/stat; within a tick, pids tell the order. */
struct run { uint32_t id; pid_t pid; uint64_t started; };
struct ended { pid_t pid; uint64_t started, ended; };

extern pid_t self;
extern bool is_init;
extern int proc; /* our /proc */
extern struct run runs[MAX_RUNS];
extern size_t run_count;
extern struct ended ended_runs[MAX_ENDED]; /* a ring; pid 0 where empty */

/* The pid a text of digits names, or 0. */
pid_t parse_pid(const char *name);

/* slotchild.c: starts `program` (looked up in PATH when it has no slash) as a process with from[0..3] as its
 * descriptors 0, 1, 2 and (or -1) 9, and nothing else open; with `terminal`, the one that 1 is becomes its
 * session's own. Returns its pid, or -1 with what failed in *error (an errno) and *step. */
pid_t start_child(const char *cwd, const char *program, char *const *argv, char *const *env, const int *from,
                  bool terminal, int *error, int *step);

/* slotends.c: what a child gets as from[0..3], and our sides of it in ours; both return an errno or 0. Pipes
 * for its output and errors (and its script, when asked for), made here so that they count against the slot's
 * own quota and not the server's; or a terminal of the slot's own, our side in ours[0], the child's as
 * whatever from[0..2] does not hold yet. */
int make_pipes(bool script, int from[4], int ours[3]);
int make_terminal(int from[4], int ours[3]);

/* slottree.c: kills the tree of a run, or everything but us (NULL), and waits (bounded) until it is
 * dead. Returns how many processes were killed. */
size_t kill_processes(const struct run *run);

/* slotguard.c: no process from here on can change the rlimits of another. False when it cannot be had. */
bool guard_limits(void);

#endif
