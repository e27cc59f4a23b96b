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
 * is nothing to read, because the process is gone for example. */
static size_t read_text(int directory, const char *path, char *text, size_t room) {
    int fd = openat(directory, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, room - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0 ? (size_t)got : 0;
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
        return false; /* gone since it was listed */
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

/* procfs lists pids in ascending order, so both tables are walked side by side. */
void scan(struct table *now, const struct table *before) {
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
                process->sent = before->at[old].sent && before->at[old].started == process->started;
        }
    }
}

struct process *find_process(struct table *table, pid_t pid) {
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

bool is_stopped(pid_t pid) {
    char name[12];
    struct process found;
    return read_process(write_pid(name, pid), &found) && found.stopped;
}

long last_pid(void) {
    char text[128];
    if (!read_text(proc, "loadavg", text, sizeof text))
        return -1;
    char *at = strrchr(text, ' ');
    return at ? strtol(at, NULL, 10) : -1;
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
    static char buffer[4096] __attribute__((aligned(8)));
    char path[32], name[12];
    const char *digits = write_pid(name, pid);
    size_t bytes = strlen(digits);
    memcpy(path, digits, bytes);
    memcpy(path + bytes, "/task", 6);
    int tasks = openat(proc, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (long got; tasks >= 0 && (got = syscall(SYS_getdents64, tasks, buffer, sizeof buffer)) > 0;)
        for (long at = 0; at < got; at += ((const struct entry *)(const void *)(buffer + at))->bytes) {
            const struct entry *entry = (const void *)(buffer + at);
            pid_t tracer = parse_pid(entry->name) ? read_tracer(tasks, entry->name) : 0;
            size_t known = 0;
            while (known < count && found[known] != tracer)
                known++;
            if (tracer && tracer != self && known == count && count < MAX_TRACERS)
                found[count++] = tracer;
        }
    if (tasks >= 0)
        close(tasks);
    return count;
}
