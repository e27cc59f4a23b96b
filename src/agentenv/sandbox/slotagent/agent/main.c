/* slotagent: PID 1 of a slot. It spawns, passes descriptors, reaps and kills; it holds no policy.
 *
 * docs/slot-agent.md is the contract. Usage: `slotagent FD [guarded] [DIRECTORY]`, where FD is a connected
 * SOCK_SEQPACKET socket, `guarded` says that its parent has installed the filter of guard.h already, and DIRECTORY, an
 * absolute path, is made if it is missing; or, inside a slot, `slotagent prove`. No heap, no stdio, no threads: all state
 * is in static tables.
 *
 * The server is trusted to behave well or to be dead: any malformed packet, and the end of the socket, end the agent,
 * and with PID 1 the kernel ends every process of the slot. The processes that it runs are not trusted at all. They
 * share its uid, so it is non-dumpable (no ptrace, no /proc/1/mem) and, as init of its pid namespace, immune to their
 * signals. What else the kernel would allow by uid alone (its limits, its priority), guard.c refuses.
 *
 * With another pid than 1 it works the same way on its own descendants: in the fake backend, and in tests.
 */
#define _GNU_SOURCE
#include "guard.h"
#include "packets.h"
#include "proc.h"
#include "relay.h"
#include "runs.h"
#include "spawn.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { VERSION = 2, MAX_EVENTS = 64, REAPS_PER_TURN = 256, SIGNALS = 64 };
enum { FAREWELLS = 1000, PAUSE_NS = 1000 * 1000 };
enum { PEER, CHILDREN, OWN_KEYS }; /* keys of what the loop waits for itself */
_Static_assert((int)OWN_KEYS <= (int)FIRST_RELAY_KEY, "a relay's keys are not the loop's");

/* ---- children that end ---- */

static void reap_one(pid_t pid, int status, const struct rusage *used) {
    uint32_t id;
    if (!end_run(pid, &id))
        return;
    const uint64_t usage[3] = {
        (uint64_t)used->ru_utime.tv_sec * 1000000 + (uint64_t)used->ru_utime.tv_usec,
        (uint64_t)used->ru_stime.tv_sec * 1000000 + (uint64_t)used->ru_stime.tv_usec,
        (uint64_t)used->ru_maxrss,
    };
    end_relay(id, status, usage);
}

/* A child that asked to be traced (PTRACE_TRACEME) has made us its tracer, and its stops are reported to us. Continue it
 * as if it was not traced. */
static void let_go(pid_t pid, int status) {
    int number = WSTOPSIG(status);
    ptrace(PTRACE_DETACH, pid, NULL, (void *)(uintptr_t)(number == SIGTRAP ? 0 : number));
}

/* Reaps orphans too. Only so many at a time, because a storm of dying processes must not keep packets waiting. Returns
 * whether there may be more. */
static bool reap(void) {
    for (int i = 0; i < REAPS_PER_TURN; i++) {
        int status;
        struct rusage used;
        pid_t pid = wait4(-1, &status, WNOHANG | __WALL, &used);
        if (pid <= 0)
            return false;
        if (WIFEXITED(status) || WIFSIGNALED(status))
            reap_one(pid, status, &used);
        else
            let_go(pid, status);
    }
    return true;
}

/* ---- packets ---- */

/* A server that came back after a crash ends what its predecessor had running: the runs with lower numbers. */
static size_t kill_before(uint32_t id) {
    size_t killed = 0;
    for (const struct run *run = next_run(NULL); run; run = next_run(run))
        if (run->id < id)
            killed += kill_processes(run);
    return killed;
}

/* To the leader's whole group; or, when the payload has the tick at which its command began, to the foreground. */
static void send_signal(const struct packet *packet, const struct run *run) {
    uint64_t since;
    int number = packet->header.arg;
    if (number < 1 || number > SIGRTMAX)
        leave(EXIT_MALFORMED);
    if (!packet->header.payload_bytes) {
        if (run)
            kill(-run->pid, number);
        return;
    }
    if (packet->header.payload_bytes != sizeof since)
        leave(EXIT_MALFORMED);
    memcpy(&since, packet->payload, sizeof since);
    if (run)
        signal_foreground(run, number, since);
}

static void handle(const struct packet *packet) {
    const struct header *header = &packet->header;
    const struct run *run = find_run(header->run);
    if (header->kind != SPAWN && (packet->fd_count || (header->payload_bytes && header->kind != SIGNAL)))
        leave(EXIT_MALFORMED);
    switch (header->kind) {
    case SPAWN:
        spawn(packet);
        break;
    case KILL:
        say_short(KILLED, header->run, run ? (int32_t)kill_processes(run) : 0);
        break;
    case KILL_ALL:
        say_short(KILLED, 0, (int32_t)kill_processes(NULL));
        break;
    case KILL_BEFORE:
        say_short(KILLED, header->run, (int32_t)kill_before(header->run));
        break;
    case PING:
        say_short(PONG, 0, header->arg);
        break;
    case SIGNAL:
        send_signal(packet, run);
        break;
    default:
        leave(EXIT_MALFORMED);
    }
}

/* ---- setting up ---- */

/* All our signals are blocked (SIGCHLD arrives by descriptor), and their actions are the default: children inherit
 * those, and not, say, Python's ignored SIGPIPE. Returns the SIGCHLD descriptor. */
static int set_up_signals(void) {
    sigset_t all, child_only;
    /* All zeros is the default action. By the bare system call, because libc reserves 32 and 33, and a program that
     * started us may have had them ignored. */
    const struct { void *handler; unsigned long flags; void *restorer; uint64_t mask; } by_default = {0};
    for (int number = 1; number <= SIGNALS; number++)
        syscall(SYS_rt_sigaction, number, &by_default, NULL, sizeof by_default.mask);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&child_only);
    sigaddset(&child_only, SIGCHLD);
    return signalfd(-1, &child_only, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Whether any is left, after those that are dead were reaped. Where we are not init we are the subreaper: who has no
 * child has no descendant either. */
static bool have_children(void) {
    pid_t pid;
    do
        pid = wait4(-1, NULL, WNOHANG | __WALL, NULL);
    while (pid > 0);
    return !pid;
}

/* For an init, the kernel does this. */
static void kill_ours(void) {
    for (int i = 0; !is_init() && i < FAREWELLS && have_children(); i++) {
        if (i) /* a process is slow to die */
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
        kill_processes(NULL);
    }
}

static int find_peer(const char *descriptor) {
    int peer = parse_pid(descriptor), type = 0;
    socklen_t bytes = sizeof type;
    if (peer < 3 || getsockopt(peer, SOL_SOCKET, SO_TYPE, &type, &bytes) < 0 || type != SOCK_SEQPACKET)
        _exit(EXIT_USAGE);
    return peer;
}

static void close_all_but(int peer) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) /* see child() in child.c */
            _exit(EXIT_SYSTEM);
    if (peer > 3)
        syscall(SYS_close_range, 3U, (unsigned)peer - 1, 0U);
    syscall(SYS_close_range, (unsigned)peer + 1, ~0U, 0U);
}

static void watch_own(int readiness, int fd, uint64_t key) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = key};
    if (epoll_ctl(readiness, EPOLL_CTL_ADD, fd, &wanted) < 0)
        _exit(EXIT_SYSTEM);
}

/* Makes a directory, and the directories that lead to it. Where it cannot be made, a command that starts in it says so. */
static void make_directory(char *path) {
    for (char *end = path + 1; *end; end++)
        if (*end == '/') {
            *end = 0;
            mkdir(path, 0755);
            *end = '/';
        }
    mkdir(path, 0755);
}

/* Returns the epoll set that the loop waits for, and the SIGCHLD descriptor in *children. */
static int set_up(const char *descriptor, bool guarded, char *directory, int *children) {
    int peer = find_peer(descriptor);
    close_all_but(peer);
    if (fcntl(peer, F_SETFD, FD_CLOEXEC) < 0 || prctl(PR_SET_DUMPABLE, 0) < 0 || !open_proc())
        _exit(EXIT_SYSTEM);
    if (!is_init() && prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        _exit(EXIT_SYSTEM);
    if (!guarded && !guard_slot(own_pid(), &(struct guard){.may_gain = false}))
        _exit(EXIT_SYSTEM);
    umask(022);
    if (directory)
        make_directory(directory);
    int readiness = epoll_create1(EPOLL_CLOEXEC);
    set_up_relays(readiness);
    open_packets(peer, kill_ours);
    *children = set_up_signals();
    if (*children < 0)
        _exit(EXIT_SYSTEM);
    say_short(HELLO, 0, VERSION);
    watch_own(readiness, peer, PEER);
    watch_own(readiness, *children, CHILDREN);
    return readiness;
}

/* ---- the loop ---- */

int main(int argc, char **argv) {
    bool guarded = argc > 2 && !strcmp(argv[2], "guarded");
    char *directory = argc > 2 + guarded ? argv[2 + guarded] : NULL;
    if (argc < 2 || argc > 3 + guarded || (directory && *directory != '/'))
        _exit(EXIT_USAGE);
    if (!strcmp(argv[1], "prove"))
        return prove_guard();
    int children, readiness = set_up(argv[1], guarded, directory, &children);
    for (bool more = false;;) {
        struct epoll_event events[MAX_EVENTS];
        int timeout_ms = relay_timeout_ms();
        int count = epoll_wait(readiness, events, MAX_EVENTS, more ? 0 : timeout_ms);
        if (count < 0 && errno != EINTR)
            leave(EXIT_SYSTEM);
        bool ready[OWN_KEYS] = {false, false};
        for (int i = 0; i < count; i++) /* first what was printed, then who ended */
            if (events[i].data.u64 < OWN_KEYS)
                ready[events[i].data.u64] = true;
            else
                turn_relay(events[i].data.u64, events[i].events);
        if (ready[CHILDREN]) {
            struct signalfd_siginfo seen;
            (void)!read(children, &seen, sizeof seen); /* every child is looked for, whichever signalled */
        }
        if (ready[CHILDREN] || more)
            more = reap();
        struct packet packet;
        if (ready[PEER] && take_packet(&packet))
            handle(&packet);
    }
}
