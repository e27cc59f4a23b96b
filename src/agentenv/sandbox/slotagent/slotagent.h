/* What the parts of slotagent share: the runs, and what is done to them. */
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

/* slotends.c: puts a copy in the slot's own memory in the place of a regular file that the server sent (input, a
 * script). So what a process of the slot keeps open is the slot's, and no file is its and the server's: whoever
 * has one can hold its locks. Leaves anything else as it is. Returns an errno or 0. */
int own_file(int *fd);

/* slotends.c: what a child gets as from[0..3], and our sides of it in ours; both return an errno or 0. Pipes
 * for its output and errors (and its script, when asked for), made here so that they count against the slot's
 * own quota and not the server's; or a terminal of the slot's own, our side in ours[0], the child's as
 * whatever from[0..2] does not hold yet. */
int make_pipes(bool script, int from[4], int ours[3]);
int make_terminal(int from[4], int ours[3]);

/* slottree.c: kills the tree of a run, or everything but us (NULL), and waits (bounded) until it is
 * dead. Returns how many processes were killed. */
size_t kill_processes(const struct run *run);

/* Signals the run's group, but not what was there before the tick `since`, nor what its shell has begun in
 * the background since then. */
void signal_foreground(const struct run *of, int number, uint64_t since);

/* Stops every process but us, so that none can fork or signal any more; and lets those go on again that
 * were not stopped before. */
void freeze_slot(void);
void thaw_slot(void);
bool is_stopped(pid_t pid);

/* slotguard.c: from here on the system calls of its table are refused, to us and to all that we start. False
 * when that cannot be had. */
bool guard_slot(void);

/* Tries every call of the table; says on descriptor 1 which was not refused, and how many were. Returns an
 * exit code. */
int prove_guard(void);

#endif
