/* slotagent: PID 1 of a slot. It spawns, passes descriptors, reaps and kills; it holds no policy.
 *
 * docs/slot-agent.md is the contract. Usage: `slotagent FD`, FD being a connected SOCK_SEQPACKET
 * socket. No heap, no stdio, no threads: what is not in the static tables below does not exist.
 *
 * The peer is trusted to be well-behaved or dead: any malformed packet, and the end of the socket,
 * end the agent, and with PID 1 the kernel ends every process of the slot. The processes it runs are
 * not trusted at all; they share its uid, so it is non-dumpable (no ptrace, no /proc/1/mem) and, as
 * init of its pid namespace, immune to their signals. A process of the slot can still change the
 * agent's rlimits or priority (the kernel checks only the uid): it then harms its own slot alone.
 *
 * Started as another pid than 1 it works the same on its own descendants: for tests.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
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
    SPAWN = 1, KILL = 2, KILL_ALL = 3, PING = 4, SIGNAL = 5,
    HELLO = 100, SPAWNED = 101, SPAWN_FAILED = 102, EXITED = 103, KILLED = 104, PONG = 105,
};
enum spawn_flag { WITH_STDIN = 1, SCRIPT_PIPE = 2, SCRIPT_FD = 4 };
enum step { STEP_RESOURCES = 1, STEP_CWD = 2, STEP_EXEC = 3 };
enum exit_code { EXIT_USAGE = 64, EXIT_MALFORMED = 65, EXIT_SYSTEM = 71 };
enum {
    MAX_PACKET = 64 * 1024, MAX_FDS = 4, MAX_RUNS = 512, MAX_ENDED = 256, MAX_PROCESSES = 16384,
    MAX_STRINGS = MAX_PACKET, SCRIPT_DESCRIPTOR = 9, REAPS_PER_TURN = 256,
    FREE_PASSES = 3, MAX_PASSES = 200, PASS_PAUSE_NS = 1000 * 1000, TICKS_PER_S = 100,
};

struct header { uint32_t kind, run; int32_t arg; uint32_t payload_bytes; };
_Static_assert(sizeof(struct header) == 16, "the header is 16 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, unswapped");

/* Start times are clock ticks since boot, as in /proc/PID/stat; within a tick, pids tell the order. */
struct run { uint32_t id; pid_t pid; uint64_t started; };
struct ended { pid_t pid; uint64_t started, ended; };
struct process { pid_t pid, parent, session; uint64_t started; bool dead, stopped, killed; signed char member; };
struct table { struct process at[MAX_PROCESSES]; size_t count; };

static int peer, proc;
static pid_t self;
static bool is_init;
static struct run runs[MAX_RUNS];
static size_t run_count;
static struct ended ended_runs[MAX_ENDED];
static size_t ended_count; /* ever; the ring keeps the last MAX_ENDED */
static char packet[MAX_PACKET];
static char *strings[MAX_STRINGS + 2];
static struct table tables[2];
static volatile int child_errno, child_step; /* written by a vforked child, which shares our memory */

static size_t kill_processes(const struct run *of);

/* ---- leaving and sending ---- */

static _Noreturn void leave(int code) {
    if (!is_init) /* the kernel does this for an init */
        kill_processes(NULL);
    _exit(code);
}

/* Blocks while the server is slow: an EXIT must not be lost, and a slot has nobody else to serve. */
static void say(enum kind kind, uint32_t run, int32_t arg, const void *payload, size_t bytes, const int *fds, size_t fd_count) {
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
            nanosleep(&(struct timespec){.tv_nsec = PASS_PAUSE_NS}, NULL); /* passes when the server reads */
        } else if (errno != EINTR) {
            leave(0);
        }
    }
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
        uint64_t usage[3] = {
            (uint64_t)used->ru_utime.tv_sec * 1000000 + (uint64_t)used->ru_utime.tv_usec,
            (uint64_t)used->ru_stime.tv_sec * 1000000 + (uint64_t)used->ru_stime.tv_usec,
            (uint64_t)used->ru_maxrss,
        };
        say(EXITED, done.id, status, usage, sizeof usage, NULL, 0);
        return;
    }
}

/* Reaps orphans too. Bounded, so that a storm of dying processes cannot keep packets waiting.
 * Returns whether there may be more. */
static bool reap(void) {
    for (int i = 0; i < REAPS_PER_TURN; i++) {
        int status;
        struct rusage used;
        pid_t pid = wait4(-1, &status, WNOHANG, &used);
        if (pid <= 0)
            return false;
        reap_one(pid, status, &used);
    }
    return true;
}

/* ---- spawning ---- */

/* Tries argv[0] in each directory of PATH, as execvpe does, without its heap and without its
 * fallback to a shell. Returns only on failure, with errno set. */
static void exec_program(char *const *argv, char *const *env) {
    static char path[MAX_PACKET + 512];
    if (strchr(argv[0], '/')) {
        execve(argv[0], argv, env);
        return;
    }
    const char *dirs = "/usr/local/bin:/usr/bin:/bin";
    for (char *const *entry = env; *entry; entry++)
        if (!strncmp(*entry, "PATH=", 5))
            dirs = *entry + 5;
    int denied = 0;
    errno = ENOENT;
    for (const char *dir = dirs; *argv[0]; dir++) {
        size_t bytes = strcspn(dir, ":"), name = strlen(argv[0]);
        if (bytes + name + 2 <= sizeof path) {
            memcpy(path, dir, bytes);
            path[bytes] = '/';
            memcpy(path + bytes + 1, argv[0], name + 1);
            execve(bytes ? path : argv[0], argv, env); /* an empty entry means the current directory */
        }
        denied |= errno == EACCES;
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
            return;
        dir += bytes;
        if (!*dir)
            break;
    }
    errno = denied ? EACCES : ENOENT;
}

/* In the vforked child: our memory is the parent's, which sleeps until the exec. Writes only locals,
 * `path` above, child_errno and child_step. `from` is what becomes 0, 1, 2 and (or -1) 9. */
static _Noreturn void child(const char *cwd, char *const *argv, char *const *env, const int from[4]) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    child_step = STEP_RESOURCES;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(from[fd], fd) < 0)
            goto failed;
    unsigned first = 3;
    if (from[3] >= 0) {
        /* dup2 onto itself would keep close-on-exec. */
        if (from[3] == SCRIPT_DESCRIPTOR ? fcntl(SCRIPT_DESCRIPTOR, F_SETFD, 0) : dup2(from[3], SCRIPT_DESCRIPTOR) < 0)
            goto failed;
        syscall(SYS_close_range, 3U, (unsigned)SCRIPT_DESCRIPTOR - 1, 0U);
        first = SCRIPT_DESCRIPTOR + 1;
    }
    syscall(SYS_close_range, first, ~0U, 0U); /* everything is close-on-exec as well: this is the belt */
    child_step = STEP_CWD;
    if (chdir(cwd) < 0)
        goto failed;
    child_step = STEP_EXEC;
    sigprocmask(SIG_SETMASK, &none, NULL);
    exec_program(argv, env);
failed:
    child_errno = errno;
    _exit(127);
}

/* A function of its own, because nothing may live in registers across vfork. */
static __attribute__((noinline)) pid_t start_child(const char *cwd, char *const *argv, char *const *env, const int *from) {
    child_errno = 0;
    child_step = STEP_RESOURCES;
    pid_t pid = vfork();
    if (!pid)
        child(cwd, argv, env, from);
    if (pid < 0)
        child_errno = errno;
    else if (child_errno)
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
    return pid;
}

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

static void spawn(const struct header *header, char *payload, int *fds, size_t fd_count) {
    int flags = header->arg, from[4] = {-1, -1, -1, -1}, ours[3] = {-1, -1, -1};
    size_t wanted_fds = !!(flags & WITH_STDIN) + (size_t)!!(flags & SCRIPT_FD);
    bool both_scripts = (flags & SCRIPT_PIPE) && (flags & SCRIPT_FD);
    if (!header->run || (flags & ~(WITH_STDIN | SCRIPT_PIPE | SCRIPT_FD)) || both_scripts || fd_count != wanted_fds)
        leave(EXIT_MALFORMED);
    char **env;
    const char *cwd = parse_spawn(payload, header->payload_bytes, &env);
    size_t taken = 0;
    if (flags & WITH_STDIN)
        from[0] = fds[taken++];
    if (flags & SCRIPT_FD)
        from[3] = fds[taken];
    int error = 0;
    if (find_run(header->run))
        error = EEXIST; /* a server that came back after a crash may not know what runs */
    else if (run_count == MAX_RUNS)
        error = EAGAIN;
    else if (from[0] < 0 && (from[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
        error = errno;
    /* Made here, so that pipes count against the slot's own quota and not the server's. */
    for (int i = 0; !error && i < 3; i++) {
        int ends[2];
        if (i == 2 && !(flags & SCRIPT_PIPE))
            break;
        if (pipe2(ends, O_CLOEXEC) < 0) {
            error = errno;
            break;
        }
        ours[i] = ends[i == 2];
        from[i + 1] = ends[i != 2];
    }
    uint64_t started = ticks_now();
    pid_t pid = 0;
    int step = STEP_RESOURCES;
    if (!error) {
        pid = start_child(cwd, strings, env, from);
        error = child_errno;
        step = child_step;
    }
    close_all(from, 4); /* the child's ends; descriptors of the packet are among them */
    if (error) {
        close_all(ours, 3);
        spawn_failed(header->run, error, step);
        return;
    }
    remember_run(header->run, pid, started);
    say(SPAWNED, header->run, pid, NULL, 0, ours, flags & SCRIPT_PIPE ? 3 : 2);
    close_all(ours, 3);
}

/* ---- killing ---- */

static bool after(uint64_t started, pid_t pid, uint64_t than, pid_t than_pid) {
    return started > than || (started == than && pid > than_pid);
}

/* The pid of a directory name, or 0. */
static pid_t parse_pid(const char *name) {
    long pid = 0;
    for (; *name; name++) {
        if (*name < '0' || *name > '9' || pid > INT32_MAX / 10 - 1)
            return 0;
        pid = pid * 10 + (*name - '0');
    }
    return (pid_t)pid;
}

static bool read_process(const char *name, struct process *into) {
    char path[32], text[1024];
    size_t bytes = strlen(name);
    if (bytes > 16)
        return false;
    memcpy(path, name, bytes);
    memcpy(path + bytes, "/stat", 6);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false; /* gone since it was listed */
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return false;
    text[got] = 0;
    char *at = strrchr(text, ')'); /* the name before it may hold anything */
    if (!at || at[1] != ' ' || !at[2])
        return false;
    char state = at[2];
    unsigned long long field[23] = {0};
    at += 3;
    for (int i = 4; i <= 22; i++)
        field[i] = (unsigned long long)strtoull(at, &at, 10); /* negative fields (tty) do not matter */
    into->pid = parse_pid(name);
    into->parent = (pid_t)field[4];
    into->session = (pid_t)field[6];
    into->started = field[22];
    /* A leader that called pthread_exit looks like a zombie while its threads live on. */
    into->dead = (state == 'Z' || state == 'X') && field[20] <= 1;
    into->stopped = state == 'T';
    into->killed = false;
    into->member = -1;
    return true;
}

/* Lists the processes of our /proc, in order of pid as procfs gives them, and carries over from
 * `before` which of them were killed already. */
static void scan(struct table *now, const struct table *before) {
    struct entry { uint64_t inode; int64_t offset; uint16_t bytes; unsigned char type; char name[]; };
    static char buffer[32768] __attribute__((aligned(8)));
    size_t old = 0;
    now->count = 0;
    lseek(proc, 0, SEEK_SET);
    for (;;) {
        long got = syscall(SYS_getdents64, proc, buffer, sizeof buffer);
        if (got <= 0)
            return;
        for (long at = 0; at < got;) {
            const struct entry *entry = (const void *)(buffer + at);
            at += entry->bytes;
            if (!parse_pid(entry->name) || now->count == MAX_PROCESSES)
                continue;
            struct process *process = &now->at[now->count];
            if (!read_process(entry->name, process))
                continue;
            now->count++;
            while (before && old < before->count && before->at[old].pid < process->pid)
                old++;
            if (before && old < before->count && before->at[old].pid == process->pid)
                process->killed = before->at[old].killed && before->at[old].started == process->started;
        }
    }
}

static struct process *find_process(struct table *table, pid_t pid) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->at[middle].pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return low < table->count && table->at[low].pid == pid ? &table->at[low] : NULL;
}

/* Whether an orphan (its parent is us, and it leads no run) belongs to `of`. A process that did not
 * call setsid still tells by its session; of the others only the time is known. */
static bool owns_orphan(const struct run *of, const struct process *orphan) {
    if (orphan->session == of->pid)
        return true;
    for (size_t i = 0; i < run_count; i++)
        if (runs[i].pid == orphan->session)
            return false;
    if (!after(orphan->started, orphan->pid, of->started, of->pid))
        return false;
    for (size_t i = 0; i < run_count; i++)
        if (after(runs[i].started, runs[i].pid, of->started, of->pid)
            && after(orphan->started, orphan->pid, runs[i].started, runs[i].pid))
            return false;
    for (size_t i = 0; i < MAX_ENDED; i++) {
        const struct ended *other = &ended_runs[i];
        if (!other->pid)
            continue;
        if (other->pid == orphan->session)
            return false;
        /* A run that came and went while `of` (a spare shell, say) waited. */
        if (after(other->started, other->pid, of->started, of->pid)
            && orphan->started >= other->started && orphan->started <= other->ended)
            return false;
    }
    return true;
}

/* Whether the process is in the tree to kill: of a run, or (`of` NULL) of us. Remembers its answer
 * in the table; `hops` bounds the walk, as parents read while processes die may form a circle. */
static bool is_member(struct table *table, struct process *process, const struct run *of, size_t hops) {
    if (process->member >= 0 || !hops)
        return process->member > 0;
    bool member = false;
    struct process *parent = find_process(table, process->parent);
    if (process->pid == self)
        member = false;
    else if (of && process->pid == of->pid)
        member = true;
    else if (process->parent == self || (!parent && is_init)) { /* no parent: it died during the scan */
        bool leads_run = false;
        for (size_t i = 0; i < run_count; i++)
            leads_run |= runs[i].pid == process->pid;
        member = !of || (!leads_run && owns_orphan(of, process));
    } else if (parent && parent != process)
        member = is_member(table, parent, of, hops - 1);
    process->member = member;
    return member;
}

/* One pass: SIGKILL for every member not yet killed. Returns how many were; *alive counts the
 * members, killed or not, that still run. */
static size_t kill_pass(struct table *table, const struct run *of, size_t *alive) {
    size_t killed = 0;
    *alive = 0;
    for (size_t i = 0; i < table->count; i++) {
        struct process *process = &table->at[i];
        if (process->dead || !is_member(table, process, of, 4096))
            continue;
        ++*alive;
        if (process->killed)
            continue;
        process->killed = true;
        killed += !kill(process->pid, SIGKILL);
    }
    return killed;
}

/* Stops every process but us, so that none can fork away from the next pass. `was_stopped` is left
 * holding who was stopped before that. */
static void freeze(struct table *was_stopped) {
    scan(was_stopped, NULL);
    if (is_init) {
        kill(-1, SIGSTOP);
        return;
    }
    for (size_t i = 0; i < was_stopped->count; i++)
        if (is_member(was_stopped, &was_stopped->at[i], NULL, 4096))
            kill(was_stopped->at[i].pid, SIGSTOP);
}

static void thaw(struct table *now, struct table *was_stopped) {
    scan(now, NULL);
    for (size_t i = 0; i < now->count; i++) {
        struct process *process = &now->at[i], *before = find_process(was_stopped, process->pid);
        bool own_wish = before && before->stopped && before->started == process->started;
        if (process->stopped && !own_wish && is_member(now, process, NULL, 4096))
            kill(process->pid, SIGCONT);
    }
}

/* Kills the tree of `of`, or everything (`of` NULL), and waits (bounded) until it is dead. Returns
 * how many processes were killed. Nothing is reaped meanwhile: the pids of our children stay theirs,
 * and a fork bomb's zombies use up its own process limit. */
static size_t kill_processes(const struct run *run) {
    static struct table was_stopped;
    struct run copy = run ? *run : (struct run){0};
    const struct run *of = run ? &copy : NULL;
    size_t killed = 0, alive = 0;
    bool frozen = false;
    tables[1].count = 0;
    for (int pass = 0; pass < MAX_PASSES; pass++) {
        struct table *now = &tables[pass % 2];
        scan(now, &tables[(pass + 1) % 2]);
        size_t found = kill_pass(now, of, &alive);
        killed += found;
        if (!of && is_init)
            kill(-1, SIGKILL); /* at once for all: what forked during the pass dies too */
        if (!alive)
            break;
        if (!found) {
            nanosleep(&(struct timespec){.tv_nsec = PASS_PAUSE_NS}, NULL); /* they are dying */
        } else if (pass + 1 >= FREE_PASSES && !frozen) {
            freeze(&was_stopped);
            frozen = true;
        }
    }
    if (frozen)
        thaw(&tables[0], &was_stopped);
    return killed;
}

/* ---- the loop ---- */

static void handle(const struct header *header, char *payload, int *fds, size_t fd_count) {
    struct run *run = find_run(header->run);
    if (header->kind != SPAWN && (fd_count || header->payload_bytes))
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
    case PING:
        say(PONG, 0, header->arg, NULL, 0, NULL, 0);
        break;
    case SIGNAL:
        if (header->arg < 1 || header->arg > SIGRTMAX)
            leave(EXIT_MALFORMED);
        if (run)
            kill(-run->pid, header->arg);
        break;
    default:
        leave(EXIT_MALFORMED);
    }
}

/* Takes one packet; leaves at the end of the socket and at anything malformed. */
static void receive(void) {
    union { char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } control;
    struct iovec part = {packet, sizeof packet};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
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
    for (int number = 1; number <= SIGRTMAX; number++)
        signal(number, SIG_DFL);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&child_only);
    sigaddset(&child_only, SIGCHLD);
    return signalfd(-1, &child_only, SFD_CLOEXEC | SFD_NONBLOCK);
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
    umask(022);
    proc = open_proc();
}

int main(int argc, char **argv) {
    if (argc != 2)
        _exit(EXIT_USAGE);
    set_up(argv[1]);
    int children = set_up_signals();
    if (children < 0)
        _exit(EXIT_SYSTEM);
    say(HELLO, 0, VERSION, NULL, 0, NULL, 0);
    for (bool more = false;;) {
        struct pollfd waits[2] = {{.fd = peer, .events = POLLIN}, {.fd = children, .events = POLLIN}};
        if (poll(waits, 2, more ? 0 : -1) < 0 && errno != EINTR)
            leave(EXIT_SYSTEM);
        if (waits[1].revents) {
            struct signalfd_siginfo seen;
            while (read(children, &seen, sizeof seen) > 0) {}
        }
        if (waits[1].revents || more)
            more = reap();
        if (waits[0].revents)
            receive();
    }
}
