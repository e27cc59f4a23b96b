/* Reading /proc without heap or stdio. See proc.h. */
#define _GNU_SOURCE
#include "proc.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FORKED_NO_EXEC = 0x40 /* PF_FORKNOEXEC, a flag in /proc/PID/stat */ };

/* A directory entry as getdents64 returns it. */
struct entry { uint64_t inode; int64_t offset; uint16_t bytes; unsigned char type; char name[]; };

/* Goes through a directory's names; begins with `got` and `at` 0. */
struct listing { _Alignas(8) char buffer[32768]; long got, at; };

static int proc;
static pid_t self;

pid_t own_pid(void) {
    return self;
}

bool is_init(void) {
    return self == 1;
}

/* ---- pids as text ---- */

pid_t parse_pid(const char *text) {
    long pid = 0;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || pid > INT32_MAX / 10 - 1)
            return 0;
        pid = pid * 10 + (*text - '0');
    }
    return (pid_t)pid;
}

/* Writes the digits of `pid` at the end of `into`. Returns where they begin. */
static const char *write_pid(char into[12], pid_t pid) {
    char *at = into + 11;
    for (*at = 0; pid; pid /= 10)
        *--at = (char)('0' + pid % 10);
    return at;
}

bool open_proc(void) {
    char name[32] = {0};
    self = getpid();
    proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return proc >= 0 && readlinkat(proc, "self", name, sizeof name - 1) >= 0 && parse_pid(name) == self;
}

/* Reads the beginning of a file below `directory` into `text` and ends it with a NUL. Returns its length; 0 when there
 * is nothing to read, for example because the process has ended. */
static size_t read_text(int directory, const char *path, char *text, size_t room) {
    int fd = openat(directory, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, room - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0 ? (size_t)got : 0;
}

/* The next name; NULL at the end of the directory. */
static const char *next_name(struct listing *listing, int directory) {
    if (listing->at == listing->got) {
        listing->at = 0;
        listing->got = syscall(SYS_getdents64, directory, listing->buffer, sizeof listing->buffer);
        if (listing->got <= 0)
            return NULL;
    }
    const struct entry *entry = (const void *)(listing->buffer + listing->at);
    listing->at += entry->bytes;
    return entry->name;
}

/* ---- processes ---- */

static bool read_process(const char *name, struct process *into) {
    char path[32], text[1024];
    size_t bytes = strlen(name);
    if (bytes > 16)
        return false;
    memcpy(path, name, bytes);
    memcpy(path + bytes, "/stat", 6);
    if (!read_text(proc, path, text, sizeof text))
        return false; /* ended since it was listed */
    char *at = strrchr(text, ')'); /* the name before it may contain anything */
    if (!at || at[1] != ' ' || !at[2])
        return false;
    char state = at[2];
    unsigned long long field[34] = {0};
    at += 3;
    for (int i = 4; i <= 33; i++)
        field[i] = (unsigned long long)strtoull(at, &at, 10); /* the negative ones (tty) are not used */
    into->pid = parse_pid(name);
    into->parent = (pid_t)field[4];
    into->group = (pid_t)field[5];
    into->session = (pid_t)field[6];
    into->started = field[22];
    /* A leader that called pthread_exit looks like a zombie while its other threads live on. */
    into->dead = (state == 'Z' || state == 'X') && field[20] <= 1;
    into->stopped = state == 'T';
    /* A shell without job control runs a background list in a copy of itself that ignores SIGINT. (SIGQUIT tells
     * nothing: a copy that is about to execute a command ignores that for a moment, too.) */
    into->async = field[9] & FORKED_NO_EXEC && field[33] & 1ULL << (SIGINT - 1);
    into->sent = false;
    into->member = -1;
    return true;
}

/* Where `pid` is in the table, or would be put. */
static size_t position(const struct table *table, pid_t pid) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->at[middle].pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool holds(const struct table *table, size_t at, pid_t pid) {
    return at < table->count && table->at[at].pid == pid;
}

struct process *find_process(struct table *table, pid_t pid) {
    size_t at = position(table, pid);
    return holds(table, at, pid) ? &table->at[at] : NULL;
}

/* Adds a process that the table does not have yet, if it is still there. */
static void add_process(struct table *now, const struct table *before, const char *name) {
    struct process found;
    pid_t pid = parse_pid(name);
    size_t at = position(now, pid);
    if (!pid || now->count == MAX_PROCESSES || holds(now, at, pid) || !read_process(name, &found))
        return;
    if (before) {
        size_t old = position(before, pid);
        found.sent = holds(before, old, pid) && before->at[old].sent && before->at[old].started == found.started;
    }
    memmove(&now->at[at + 1], &now->at[at], (now->count - at) * sizeof found);
    now->at[at] = found;
    now->count++;
}

/* Adds our children to the table, unless `now` is NULL. Returns how many there are; -1 when this kernel does not say. */
static long list_children(struct table *now, const struct table *before) {
    char text[4096], name[12];
    size_t length = 0;
    long count = 0;
    int fd = openat(proc, "thread-self/children", O_RDONLY | O_CLOEXEC); /* we are one thread, so all of them */
    if (fd < 0)
        return -1;
    for (ssize_t got; (got = read(fd, text, sizeof text)) > 0;)
        for (ssize_t at = 0; at < got; at++)
            if (text[at] != ' ' && length < sizeof name - 1) {
                name[length++] = text[at];
            } else {
                name[length] = 0;
                length = 0;
                count++;
                if (now)
                    add_process(now, before, name);
            }
    close(fd);
    return count;
}

long count_children(void) {
    return list_children(NULL, NULL);
}

/* The listing goes up from pid to pid and so misses what is forked behind its place, which happens when the pids have
 * started again from the smallest. A process that forks and ends forever could hide there; but it is our child. */
long scan(struct table *now, const struct table *before) {
    static struct listing listing;
    listing.got = listing.at = 0;
    now->count = 0;
    lseek(proc, 0, SEEK_SET);
    for (const char *name; (name = next_name(&listing, proc));)
        add_process(now, before, name);
    return list_children(now, before);
}

bool is_stopped(pid_t pid) {
    char name[12];
    struct process found;
    return read_process(write_pid(name, pid), &found) && found.stopped;
}

/* ---- tracers ---- */

/* The pid of the process that traces this thread; 0 when none does. */
static pid_t read_tracer(int tasks, const char *thread) {
    char path[32], text[512];
    size_t bytes = strlen(thread);
    memcpy(path, thread, bytes);
    memcpy(path + bytes, "/status", 8);
    if (!read_text(tasks, path, text, sizeof text))
        return 0;
    const char *line = strstr(text, "\nTracerPid:\t"); /* it comes early, and a process's name cannot forge it */
    return line ? (pid_t)strtol(line + strlen("\nTracerPid:\t"), NULL, 10) : 0;
}

size_t add_tracers(pid_t pid, pid_t *found, size_t count) {
    static struct listing listing;
    char path[32], written[12];
    const char *digits = write_pid(written, pid);
    size_t bytes = strlen(digits);
    memcpy(path, digits, bytes);
    memcpy(path + bytes, "/task", 6);
    int tasks = openat(proc, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (tasks < 0)
        return count;
    listing.got = listing.at = 0;
    for (const char *thread; (thread = next_name(&listing, tasks));) {
        pid_t tracer = parse_pid(thread) ? read_tracer(tasks, thread) : 0;
        size_t known = 0;
        while (known < count && found[known] != tracer)
            known++;
        if (tracer && tracer != self && known == count && count < MAX_TRACERS)
            found[count++] = tracer;
    }
    close(tasks);
    return count;
}
