/* slotagent: PID 1 of a slot. It spawns, passes descriptors, reaps and kills; it holds no policy.
 *
 * docs/slot-agent.md is the contract. Usage: `slotagent FD`, FD being a connected SOCK_SEQPACKET
 * socket; or, inside a slot, `slotagent prove` (see guard.c). No heap, no stdio, no threads: what is not in the static tables below does not exist.
 *
 * The peer is trusted to be well-behaved or dead: any malformed packet, and the end of the socket,
 * end the agent, and with PID 1 the kernel ends every process of the slot. The processes it runs are
 * not trusted at all; they share its uid, so it is non-dumpable (no ptrace, no /proc/1/mem) and, as
 * init of its pid namespace, immune to their signals. What else the kernel would allow by uid alone (its
 * limits, its priority) guard.c refuses.
 *
 * Started as another pid than 1 it works the same on its own descendants: for tests.
 */
#define _GNU_SOURCE
#include "slotagent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
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
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { VERSION = 1 };
enum kind {
    SPAWN = 1, KILL = 2, KILL_ALL = 3, PING = 4, SIGNAL = 5, KILL_BEFORE = 6,
    HELLO = 100, SPAWNED = 101, SPAWN_FAILED = 102, EXITED = 103, KILLED = 104, PONG = 105,
};
enum spawn_flag { WITH_STDIN = 1, SCRIPT_PIPE = 2, SCRIPT_FD = 4, PROGRAM = 8, TERMINAL = 16, WITH_ANSWERS = 32 };
enum exit_code { EXIT_USAGE = 64, EXIT_MALFORMED = 65, EXIT_SYSTEM = 71 };
enum { PEER, CHILDREN }; /* keys of what the loop waits for; see relay.c for the others */
enum { MAX_EVENTS = 64 };
enum { MAX_FDS = 4, MAX_STRINGS = MAX_PACKET, REAPS_PER_TURN = 256, TICKS_PER_S = 100, SIGNALS = 64 };

struct header { uint32_t kind, run; int32_t arg; uint32_t payload_bytes; };
_Static_assert(sizeof(struct header) == 16, "the header is 16 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, unswapped");

pid_t self;
bool is_init;
int proc;
int readiness;
struct run runs[MAX_RUNS];
size_t run_count;
struct ended ended_runs[MAX_ENDED];

static int peer;
static size_t ended_count; /* ever; the ring keeps the last MAX_ENDED */
static char packet[MAX_PACKET];
static char *strings[MAX_STRINGS + 2];

/* ---- leaving and sending ---- */

static _Noreturn void leave(int code) {
    if (!is_init) /* the kernel does this for an init */
        kill_processes(NULL);
    _exit(code);
}

/* Blocks while the server is slow: an EXIT must not be lost, and a slot has nobody else to serve. */
static void say(
    enum kind kind, uint32_t run, int32_t arg, const void *payload, size_t bytes, const int *fds, size_t fd_count) {
    struct header header = {(uint32_t)kind, run, arg, (uint32_t)bytes};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)(uintptr_t)payload, bytes}};
    union { char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } control;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = bytes ? 2 : 1};
    if (fd_count) {
        memset(&control, 0, sizeof control);
        control.align.cmsg_level = SOL_SOCKET;
        control.align.cmsg_type = SCM_RIGHTS;
        control.align.cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(&control.align), fds, fd_count * sizeof(int));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
    }
    for (;;) {
        if (sendmsg(peer, &message, MSG_NOSIGNAL) >= 0)
            return;
        if (errno == EAGAIN) { /* the peer made our end non-blocking */
            struct pollfd writable = {.fd = peer, .events = POLLOUT};
            poll(&writable, 1, -1);
        } else if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) {
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL); /* passes when the server reads */
        } else if (errno != EINTR) {
            leave(0);
        }
    }
}

void say_exited(uint32_t run, int32_t status, const uint64_t usage[3]) {
    say(EXITED, run, status, usage, 3 * sizeof usage[0], NULL, 0);
}

/* ---- runs ---- */

static struct run *find_run(uint32_t id) {
    for (size_t i = 0; i < run_count; i++)
        if (runs[i].id == id)
            return &runs[i];
    return NULL;
}

static uint64_t ticks_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * TICKS_PER_S + (uint64_t)now.tv_nsec / (1000000000 / TICKS_PER_S);
}

static void remember_run(uint32_t id, pid_t pid, uint64_t started) {
    for (size_t i = 0; i < MAX_ENDED; i++)
        if (ended_runs[i].pid == pid) /* the pid came round again: the old session is long gone */
            ended_runs[i].pid = 0;
    runs[run_count++] = (struct run){id, pid, started};
}

static void reap_one(pid_t pid, int status, const struct rusage *used) {
    for (size_t i = 0; i < run_count; i++) {
        if (runs[i].pid != pid)
            continue;
        struct run done = runs[i];
        runs[i] = runs[--run_count];
        ended_runs[ended_count++ % MAX_ENDED] = (struct ended){pid, done.started, ticks_now()};
        const uint64_t usage[3] = {
            (uint64_t)used->ru_utime.tv_sec * 1000000 + (uint64_t)used->ru_utime.tv_usec,
            (uint64_t)used->ru_stime.tv_sec * 1000000 + (uint64_t)used->ru_stime.tv_usec,
            (uint64_t)used->ru_maxrss,
        };
        end_relay(done.id, status, usage);
        return;
    }
}

/* A child that asked to be traced (PTRACE_TRACEME) has made us its tracer, and its stops are told to us. It
 * goes on as one that nobody traces would. */
static void let_go(pid_t pid, int status) {
    int number = WSTOPSIG(status);
    ptrace(PTRACE_DETACH, pid, NULL, (void *)(uintptr_t)(number == SIGTRAP ? 0 : number));
}

/* Reaps orphans too. Bounded, so that a storm of dying processes cannot keep packets waiting.
 * Returns whether there may be more. */
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

/* ---- spawning ---- */

/* Splits the payload in place into strings[]: argv, NULL, env, NULL. Returns cwd; leaves when malformed. */
static const char *parse_spawn(char *payload, size_t bytes, char ***env) {
    uint16_t counts[2];
    if (bytes < sizeof counts + 1 || payload[bytes - 1])
        leave(EXIT_MALFORMED);
    memcpy(counts, payload, sizeof counts);
    char *next = payload + sizeof counts, *end = payload + bytes;
    const char *cwd = next;
    next += strlen(next) + 1;
    size_t wanted = (size_t)counts[0] + counts[1], at = 0;
    if (!counts[0] || wanted > (size_t)(end - next)) /* each string takes a byte at least */
        leave(EXIT_MALFORMED);
    for (size_t i = 0; i < wanted; i++) {
        if (i == counts[0])
            strings[at++] = NULL;
        if (next == end || (i >= counts[0] && !strchr(next, '=')))
            leave(EXIT_MALFORMED);
        strings[at++] = next;
        next += strlen(next) + 1;
    }
    if (next != end)
        leave(EXIT_MALFORMED);
    strings[at++] = NULL;
    strings[at] = NULL; /* with no env at all, this one ends it */
    *env = strings + counts[0] + 1;
    return cwd;
}

static void spawn_failed(uint32_t id, int error, int step) {
    uint32_t payload = (uint32_t)step;
    say(SPAWN_FAILED, id, error, &payload, sizeof payload, NULL, 0);
}

static void close_all(int *fds, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

/* Output, errors and, when asked for, the script: a pipe each for the child, a socket each for the server. */
static int make_streams(bool script, struct relay *relay, int from[4], int ours[3]) {
    int error = make_stream(relay, OUT, &ours[0], &from[1]);
    if (!error)
        error = make_stream(relay, ERR, &ours[1], &from[2]);
    if (!error && script)
        error = make_stream(relay, SCRIPT, &ours[2], &from[3]);
    return error;
}

/* What the child reads or answers over sockets of the server's becomes a pipe, a file of the server's a copy. */
static int take_ends(int flags, struct relay *relay, int from[4]) {
    int sock = from[0], error = 0;
    if (is_socket(sock)) {
        from[0] = -1;
        error = join_stream(relay, INPUT, sock, &from[0]);
    } else {
        error = own_file(&from[0]);
    }
    if (error || !(flags & WITH_ANSWERS))
        return error ? error : own_file(&from[3]);
    sock = from[3];
    from[3] = -1;
    return join_stream(relay, ANSWERS, sock, &from[3]);
}

/* Everything the child is to have: from[0..2] and, with a script or answers, from[3]. Returns an errno or 0. */
static int make_ends(int flags, struct relay *relay, int from[4], int ours[3]) {
    if (is_relayed(relay->run)) /* from its start on, and until its end is told */
        return EEXIST; /* a server that came back after a crash may not know what runs */
    if (runs_relayed() == MAX_RUNS)
        return EAGAIN;
    int error = take_ends(flags, relay, from);
    if (error)
        return error;
    if (flags & TERMINAL)
        return make_terminal(from, ours);
    if (from[0] < 0 && (from[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
        return errno;
    return make_streams(flags & SCRIPT_PIPE, relay, from, ours);
}

static bool flags_fit(int flags, size_t fd_count) {
    int of_nine = flags & (SCRIPT_PIPE | SCRIPT_FD | WITH_ANSWERS);
    size_t wanted_fds = !!(flags & WITH_STDIN) + (size_t)!!(flags & (SCRIPT_FD | WITH_ANSWERS));
    if ((flags & ~(WITH_STDIN | PROGRAM | TERMINAL)) != of_nine || (of_nine & (of_nine - 1)) || fd_count != wanted_fds)
        return false;
    return !(flags & SCRIPT_PIPE) || !(flags & TERMINAL);
}

static void spawn(const struct header *header, char *payload, int *fds, size_t fd_count) {
    int flags = header->arg, from[4] = {-1, -1, -1, -1}, ours[3] = {-1, -1, -1};
    if (!header->run || !flags_fit(flags, fd_count))
        leave(EXIT_MALFORMED);
    char **env;
    const char *cwd = parse_spawn(payload, header->payload_bytes, &env), *program = strings[0];
    char **argv = flags & PROGRAM ? strings + 1 : strings;
    if (!*argv)
        leave(EXIT_MALFORMED);
    size_t taken = 0;
    if (flags & WITH_STDIN)
        from[0] = fds[taken++];
    if (flags & (SCRIPT_FD | WITH_ANSWERS))
        from[3] = fds[taken];
    struct relay relay;
    no_streams(&relay);
    relay.run = header->run;
    int step = STEP_RESOURCES, error = make_ends(flags, &relay, from, ours);
    uint64_t started = ticks_now();
    pid_t pid = -1;
    if (!error)
        pid = start_child(cwd, program, argv, env, from, flags & TERMINAL, &error, &step);
    close_all(from, 4); /* the child's ends; descriptors of the packet are among them */
    if (error) {
        drop_streams(&relay);
        close_all(ours, 3);
        spawn_failed(header->run, error, step);
        return;
    }
    remember_run(header->run, pid, started);
    begin_relay(&relay);
    size_t count = flags & TERMINAL ? 1 : flags & SCRIPT_PIPE ? 3 : 2;
    say(SPAWNED, header->run, pid, &relay.input_inode, sizeof relay.input_inode, ours, count);
    close_all(ours, 3);
}

/* A server that came back after a crash ends what its predecessor had running, whose numbers are lower. */
static size_t kill_before(uint32_t id) {
    size_t killed = 0;
    for (size_t i = 0; i < run_count; i++)
        if (runs[i].id < id)
            killed += kill_processes(&runs[i]);
    return killed;
}

/* To the leader's whole group; or, when the payload says at which tick its command began, to the foreground. */
static void send_signal(const struct header *header, const char *payload, const struct run *run) {
    uint64_t since;
    if (header->arg < 1 || header->arg > SIGRTMAX)
        leave(EXIT_MALFORMED);
    if (!header->payload_bytes) {
        if (run)
            kill(-run->pid, header->arg);
        return;
    }
    if (header->payload_bytes != sizeof since)
        leave(EXIT_MALFORMED);
    memcpy(&since, payload, sizeof since);
    if (run)
        signal_foreground(run, header->arg, since);
}

/* ---- the loop ---- */

static void handle(const struct header *header, char *payload, int *fds, size_t fd_count) {
    struct run *run = find_run(header->run);
    if (header->kind != SPAWN && (fd_count || (header->payload_bytes && header->kind != SIGNAL)))
        leave(EXIT_MALFORMED);
    switch (header->kind) {
    case SPAWN:
        spawn(header, payload, fds, fd_count);
        break;
    case KILL:
        say(KILLED, header->run, run ? (int32_t)kill_processes(run) : 0, NULL, 0, NULL, 0);
        break;
    case KILL_ALL:
        say(KILLED, 0, (int32_t)kill_processes(NULL), NULL, 0, NULL, 0);
        break;
    case KILL_BEFORE:
        say(KILLED, header->run, (int32_t)kill_before(header->run), NULL, 0, NULL, 0);
        break;
    case PING:
        say(PONG, 0, header->arg, NULL, 0, NULL, 0);
        break;
    case SIGNAL:
        send_signal(header, payload, run);
        break;
    default:
        leave(EXIT_MALFORMED);
    }
}

/* Takes one packet; leaves at the end of the socket and at anything malformed. */
static void receive(void) {
    union { char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } control;
    struct iovec part = {packet, sizeof packet};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    ssize_t got = recvmsg(peer, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (got <= 0)
        leave(0);
    int fds[MAX_FDS];
    size_t fd_count = 0;
    for (struct cmsghdr *part_of = CMSG_FIRSTHDR(&message); part_of; part_of = CMSG_NXTHDR(&message, part_of)) {
        if (part_of->cmsg_level != SOL_SOCKET || part_of->cmsg_type != SCM_RIGHTS)
            leave(EXIT_MALFORMED);
        size_t count = (part_of->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        if (count > MAX_FDS - fd_count)
            leave(EXIT_MALFORMED);
        memcpy(fds + fd_count, CMSG_DATA(part_of), count * sizeof(int));
        fd_count += count;
    }
    struct header header;
    if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || (size_t)got < sizeof header)
        leave(EXIT_MALFORMED);
    memcpy(&header, packet, sizeof header);
    if (header.payload_bytes != (size_t)got - sizeof header)
        leave(EXIT_MALFORMED);
    handle(&header, packet + sizeof header, fds, fd_count);
}

/* Our signals all blocked (SIGCHLD arrives by descriptor), their actions default: children inherit
 * the actions, not Python's ignored SIGPIPE. Returns the SIGCHLD descriptor. */
static int set_up_signals(void) {
    sigset_t all, child_only;
    /* All zeros is the default action. By the bare system call, because libc keeps 32 and 33 to itself,
     * and whoever started us may have had them ignored. */
    const struct { void *handler; unsigned long flags; void *restorer; uint64_t mask; } by_default = {0};
    for (int number = 1; number <= SIGNALS; number++)
        syscall(SYS_rt_sigaction, number, &by_default, NULL, sizeof by_default.mask);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&child_only);
    sigaddset(&child_only, SIGCHLD);
    return signalfd(-1, &child_only, SFD_CLOEXEC | SFD_NONBLOCK);
}

pid_t parse_pid(const char *name) {
    long pid = 0;
    for (; *name; name++) {
        if (*name < '0' || *name > '9' || pid > INT32_MAX / 10 - 1)
            return 0;
        pid = pid * 10 + (*name - '0');
    }
    return (pid_t)pid;
}

/* Our /proc must show our own pid namespace, or its pids would be somebody else's. */
static int open_proc(void) {
    char name[32] = {0};
    int fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || readlinkat(fd, "self", name, sizeof name - 1) < 0 || parse_pid(name) != self)
        _exit(EXIT_SYSTEM);
    return fd;
}

static void set_up(const char *descriptor) {
    self = getpid();
    is_init = self == 1;
    peer = parse_pid(descriptor);
    int type = 0;
    socklen_t bytes = sizeof type;
    if (peer < 3 || getsockopt(peer, SOL_SOCKET, SO_TYPE, &type, &bytes) < 0 || type != SOCK_SEQPACKET)
        _exit(EXIT_USAGE);
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) /* 0-2 must be taken: see child() */
            _exit(EXIT_SYSTEM);
    if (peer > 3)
        syscall(SYS_close_range, 3U, (unsigned)peer - 1, 0U);
    syscall(SYS_close_range, (unsigned)peer + 1, ~0U, 0U);
    if (fcntl(peer, F_SETFD, FD_CLOEXEC) < 0 || prctl(PR_SET_DUMPABLE, 0) < 0)
        _exit(EXIT_SYSTEM);
    if (!is_init && prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        _exit(EXIT_SYSTEM);
    if (!guard_slot())
        _exit(EXIT_SYSTEM);
    umask(022);
    readiness = epoll_create1(EPOLL_CLOEXEC);
    set_up_relays();
    proc = open_proc();
}

static void watch_own(int fd, uint64_t key) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = key};
    if (epoll_ctl(readiness, EPOLL_CTL_ADD, fd, &wanted) < 0)
        _exit(EXIT_SYSTEM);
}

int main(int argc, char **argv) {
    if (argc != 2)
        _exit(EXIT_USAGE);
    if (!strcmp(argv[1], "prove"))
        return prove_guard();
    set_up(argv[1]);
    int children = set_up_signals();
    if (children < 0)
        _exit(EXIT_SYSTEM);
    say(HELLO, 0, VERSION, NULL, 0, NULL, 0);
    watch_own(peer, PEER);
    watch_own(children, CHILDREN);
    for (bool more = false;;) {
        struct epoll_event events[MAX_EVENTS];
        int timeout_ms = relay_timeout_ms();
        int count = epoll_wait(readiness, events, MAX_EVENTS, more ? 0 : timeout_ms);
        if (count < 0 && errno != EINTR)
            leave(EXIT_SYSTEM);
        bool ready[2] = {false, false};
        for (int i = 0; i < count; i++) /* first what was printed, then who ended */
            if (events[i].data.u64 <= CHILDREN)
                ready[events[i].data.u64] = true;
            else
                turn_relay(events[i].data.u64, events[i].events);
        if (ready[CHILDREN]) {
            struct signalfd_siginfo seen;
            (void)!read(children, &seen, sizeof seen); /* all children are looked for, whoever signalled */
        }
        if (ready[CHILDREN] || more)
            more = reap();
        if (ready[PEER])
            receive();
    }
}
