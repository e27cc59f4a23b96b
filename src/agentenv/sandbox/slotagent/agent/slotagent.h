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
extern int readiness; /* the epoll set that the loop waits for */
extern struct run runs[MAX_RUNS];
extern size_t run_count;
extern struct ended ended_runs[MAX_ENDED]; /* a ring; pid 0 where empty */

/* The pid a text of digits names, or 0. */
pid_t parse_pid(const char *name);

/* child.c: starts `program` (looked up in PATH when it has no slash) as a process with from[0..3] as its
 * descriptors 0, 1, 2 and (or -1) 9, and nothing else open; with `terminal`, the one that 1 is becomes its
 * session's own. Returns its pid, or -1 with what failed in *error (an errno) and *step. */
pid_t start_child(const char *cwd, const char *program, char *const *argv, char *const *env, const int *from,
                  bool terminal, int *error, int *step);

/* ends.c: puts a copy in the slot's own memory in the place of a regular file that the server sent (input, a
 * script). So what a process of the slot keeps open is the slot's, and no file is its and the server's: whoever
 * has one can hold its locks. Leaves anything else as it is. Returns an errno or 0. */
int own_file(int *fd);

/* ends.c: a terminal of the slot's own, our side in *ours, the child's as whatever from[0..2] does not hold yet.
 * Returns an errno or 0. */
int make_terminal(int from[4], int *ours);

/* relay.c: what a run reads (INPUT, SCRIPT) and prints passes between its pipes, which are here and in the slot,
 * and sockets, whose other ends the server has. Pipes are made here, so that they count against the slot's quota. */
enum stream_name { INPUT, SCRIPT, OUT, ERR, ANSWERS, STREAMS };
struct stream {
    int pipe, sock;    /* our ends, or -1 */
    bool full;         /* what takes has no room: wait for that, and not for more to give */
    bool unwatched;    /* not to be looked at yet */
    size_t owed_bytes; /* of OUT, ERR, ANSWERS: what must arrive before something else is told */
    uint32_t source_watched, sink_watched;
};
struct relay {
    uint32_t run;
    bool owes;  /* an answer waits for what was printed before it */
    bool ended; /* the run's end waits for it; it is told with: */
    int32_t status;
    uint64_t usage[3], input_inode; /* which pipe the run reads, 0 when none */
    uint64_t watched_from_ns; /* when its output begins to be watched; 0: it is, or no time is set */
    struct stream streams[STREAMS];
};

void set_up_relays(void);
void no_streams(struct relay *of);
void drop_streams(struct relay *of);
bool is_socket(int fd);

/* A stream over `sock` (a socket of the server's, ours from now on) or over a new one, whose other end is then in
 * *ours; *theirs is the child's end. Both return an errno or 0; what was made is in the relay either way. */
int join_stream(struct relay *of, enum stream_name name, int sock, int *theirs);
int make_stream(struct relay *of, enum stream_name name, int *ours, int *theirs);

/* From begin_relay to end_relay, which says that the run has ended (say_exited) once all that it had printed by then
 * is with the server. What its background processes print later goes nowhere. */
void begin_relay(const struct relay *of);
void end_relay(uint32_t run, int32_t status, const uint64_t usage[3]);
size_t runs_relayed(void);
bool is_relayed(uint32_t run);

/* What to do about an event of `readiness` whose key is none of the loop's own (below 16). */
void turn_relay(uint64_t key, uint32_t events);

/* How long the loop may wait at most; -1: as long as it takes. */
int relay_timeout_ms(void);

/* main.c */
void say_exited(uint32_t run, int32_t status, const uint64_t usage[3]);

/* tree.c: kills the tree of a run, or everything but us (NULL), and waits (bounded) until it is
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

/* guard.c: from here on the system calls of its table are refused, to us and to all that we start. False
 * when that cannot be had. */
bool guard_slot(void);

/* Tries every call of the table; says on descriptor 1 which was not refused, and how many were. Returns an
 * exit code. */
int prove_guard(void);

#endif
