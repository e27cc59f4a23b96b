/* Which processes belong to a run, and killing them: docs/slot-agent.md, "What belongs to a run". */
#define _GNU_SOURCE
#include "slotagent.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* More processes than a slot may ever have; untouched memory costs nothing. */
enum { MAX_PROCESSES = 16384, MAX_DEPTH = 4096, MAX_PASSES = 200, MAX_UNSURE = 20, MAX_TRACERS = 1024 };
enum { FORKED_NO_EXEC = 0x40 /* PF_FORKNOEXEC, a flag in /proc/PID/stat */ };
enum { PATIENT_PASSES = 20 }; /* a debugger has this long to let go of what was killed */
#ifndef FREE_PASSES /* tests freeze at once, or they would hardly ever see it done */
#define FREE_PASSES 3
#endif

struct process {
    pid_t pid, parent, session, group;
    uint64_t started;
    bool dead, stopped, killed, async;
    signed char member;
};
struct table { struct process at[MAX_PROCESSES]; size_t count; };

static struct table tables[2], was_stopped, to_continue;

struct entry { uint64_t inode; int64_t offset; uint16_t bytes; unsigned char type; char name[]; }; /* of a directory */

static bool after(uint64_t started, pid_t pid, uint64_t than, pid_t than_pid) {
    return started > than || (started == than && pid > than_pid);
}

/* The digits of `pid`, somewhere in `into`. */
static const char *write_pid(char into[12], pid_t pid) {
    char *at = into + 11;
    for (*at = 0; pid; pid /= 10)
        *--at = (char)('0' + pid % 10);
    return at;
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
    unsigned long long field[34] = {0};
    at += 3;
    for (int i = 4; i <= 33; i++)
        field[i] = (unsigned long long)strtoull(at, &at, 10); /* negative fields (tty) do not matter */
    into->pid = parse_pid(name);
    into->parent = (pid_t)field[4];
    into->group = (pid_t)field[5];
    into->session = (pid_t)field[6];
    into->started = field[22];
    /* A leader that called pthread_exit looks like a zombie while its threads live on. */
    into->dead = (state == 'Z' || state == 'X') && field[20] <= 1;
    into->stopped = state == 'T';
    /* How a shell without job control runs a list in the background: in a copy of itself that ignores SIGINT.
     * (SIGQUIT says nothing: the copy that is about to execute a command ignores that for a moment.) */
    into->async = field[9] & FORKED_NO_EXEC && field[33] & 1ULL << (SIGINT - 1);
    into->killed = false;
    into->member = -1;
    return true;
}

/* Lists the processes of our /proc, in order of pid as procfs gives them, and carries over from
 * `before` which of them were killed already. */
static void scan(struct table *now, const struct table *before) {
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

/* The pid given out last in our pid namespace; while it stays the same, nobody forked. -1: unknown. */
static long last_pid(void) {
    char text[128];
    int fd = openat(proc, "loadavg", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return -1;
    text[got] = 0;
    char *at = strrchr(text, ' ');
    return at ? strtol(at, NULL, 10) : -1;
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
        if (process->dead || !is_member(table, process, of, MAX_DEPTH))
            continue;
        ++*alive;
        if (process->killed)
            continue;
        process->killed = true;
        killed += !kill(process->pid, SIGKILL);
    }
    return killed;
}

/* The pid of whoever traces this thread, from the text of its status; 0: nobody. */
static pid_t read_tracer(int tasks, const char *thread) {
    char path[32], text[512];
    size_t bytes = strlen(thread);
    memcpy(path, thread, bytes);
    memcpy(path + bytes, "/status", 8);
    int fd = openat(tasks, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1); /* the line comes early, and a name cannot forge it */
    close(fd);
    text[got > 0 ? got : 0] = 0;
    const char *line = strstr(text, "\nTracerPid:\t");
    return line ? (pid_t)strtol(line + strlen("\nTracerPid:\t"), NULL, 10) : 0;
}

/* Adds to `found` whoever traces a thread of `pid` and is not in it yet. Returns the new count. */
static size_t add_tracers(pid_t pid, pid_t *found, size_t count) {
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

static bool is_traced(pid_t pid) {
    pid_t found[MAX_TRACERS];
    return add_tracers(pid, found, 0) > 0;
}

/* A tracer keeps what is dead from its parent, and can hold what was killed on its way out: then it dies as
 * well, and whoever does that to it. */
static void kill_tracers(pid_t pid) {
    static pid_t found[MAX_TRACERS];
    size_t count = add_tracers(pid, found, 0);
    for (size_t i = 0; i < count; i++) {
        kill(found[i], SIGKILL);
        count = add_tracers(found[i], found, count);
    }
}

/* Frees what was killed, but is kept by those who trace it. */
static void release(const struct table *table, const struct run *of) {
    if (of)
        kill_tracers(of->pid);
    for (size_t i = 0; i < table->count; i++)
        if (table->at[i].killed && !table->at[i].dead)
            kill_tracers(table->at[i].pid);
}

bool is_stopped(pid_t pid) {
    char name[12];
    struct process found;
    return read_process(write_pid(name, pid), &found) && found.stopped;
}

void freeze_slot(void) {
    scan(&was_stopped, NULL);
    if (is_init) {
        kill(-1, SIGSTOP);
        return;
    }
    for (size_t i = 0; i < was_stopped.count; i++)
        if (is_member(&was_stopped, &was_stopped.at[i], NULL, MAX_DEPTH))
            kill(was_stopped.at[i].pid, SIGSTOP);
}

/* Continues also what does not look stopped: a SIGSTOP may still be on its way, and SIGCONT takes it back. */
void thaw_slot(void) {
    struct table *now = &to_continue;
    scan(now, NULL);
    for (size_t i = 0; i < now->count; i++) {
        struct process *process = &now->at[i], *before = find_process(&was_stopped, process->pid);
        bool own_wish = before && before->stopped && before->started == process->started;
        if (!process->dead && !own_wish && is_member(now, process, NULL, MAX_DEPTH))
            kill(process->pid, SIGCONT);
    }
}

/* Nothing is reaped meanwhile: the pids of our children stay theirs,
 * and a fork bomb's zombies use up its own process limit. */
size_t kill_processes(const struct run *run) {
    struct run copy = run ? *run : (struct run){0};
    const struct run *of = run ? &copy : NULL;
    size_t killed = 0, alive = 0;
    bool frozen = false;
    int unsure = 0;
    tables[1].count = 0;
    for (int pass = 0; pass < MAX_PASSES; pass++) {
        struct table *now = &tables[pass % 2];
        long last = last_pid();
        scan(now, &tables[(pass + 1) % 2]);
        size_t found = kill_pass(now, of, &alive);
        killed += found;
        if (!of && is_init)
            kill(-1, SIGKILL); /* at once for all: what forked during the pass dies too */
        if (!alive && !(of && is_traced(of->pid))) {
            /* A process that forked once the listing had passed, and died before it was read, hides its
             * child from a scan: one is believed if nobody forked meanwhile. Where others always do (or
             * in the machine's own pid namespace), so many in a row are. */
            if ((last >= 0 && last == last_pid()) || ++unsure == MAX_UNSURE)
                break;
            continue;
        }
        unsure = 0;
        if (!found) {
            if (frozen) /* none can fork any more; and those who trace the dead must be able to let go */
                thaw_slot();
            frozen = false;
            if (pass >= PATIENT_PASSES)
                release(now, of);
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL); /* they are dying */
        } else if (pass + 1 >= FREE_PASSES && !frozen) {
            freeze_slot();
            frozen = true;
        }
    }
    if (frozen)
        thaw_slot();
    return killed;
}

/* Whether a process of the leader's group belongs to what was begun at `since` and runs in the foreground. */
static bool in_foreground(struct table *table, const struct process *process, const struct run *of, uint64_t since) {
    for (size_t hops = 0; process && process->pid != of->pid && process->pid != self && hops < MAX_DEPTH; hops++) {
        if (process->started < since || (process->parent == of->pid && process->async))
            return false;
        process = find_process(table, process->parent); /* nobody: an orphan of the foreground */
    }
    return true;
}

static bool spares_somebody(struct table *table, const struct run *of, uint64_t since) {
    for (size_t i = 0; i < table->count; i++)
        if (table->at[i].group == of->pid && !in_foreground(table, &table->at[i], of, since))
            return true;
    return false;
}

void signal_foreground(const struct run *of, int number, uint64_t since) {
    struct table *before = &tables[0], *now = &tables[1];
    scan(before, NULL);
    if (!spares_somebody(before, of, since)) {
        kill(-of->pid, number);
        return;
    }
    /* Nobody may come or go while each is told: a shell whose command was missed would go on. */
    kill(-of->pid, SIGSTOP);
    scan(now, NULL);
    for (size_t i = 0; i < now->count; i++)
        if (now->at[i].group == of->pid && in_foreground(now, &now->at[i], of, since))
            kill(now->at[i].pid, number);
    for (size_t i = 0; i < now->count; i++) {
        struct process *process = &now->at[i], *known = find_process(before, process->pid);
        bool own_wish = known && known->stopped && known->started == process->started;
        if (process->group == of->pid && !own_wish)
            kill(process->pid, SIGCONT);
    }
}
