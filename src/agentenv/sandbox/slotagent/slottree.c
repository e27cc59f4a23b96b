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
enum { MAX_PROCESSES = 16384, MAX_DEPTH = 4096, MAX_PASSES = 200, MAX_UNSURE = 20 };
#ifndef FREE_PASSES /* tests freeze at once, or they would hardly ever see it done */
#define FREE_PASSES 3
#endif

struct process { pid_t pid, parent, session; uint64_t started; bool dead, stopped, killed; signed char member; };
struct table { struct process at[MAX_PROCESSES]; size_t count; };

static struct table tables[2];

static bool after(uint64_t started, pid_t pid, uint64_t than, pid_t than_pid) {
    return started > than || (started == than && pid > than_pid);
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

/* Stops every process but us, so that none can fork away from the next pass. `was_stopped` is left
 * holding who was stopped before that. */
static void freeze(struct table *was_stopped) {
    scan(was_stopped, NULL);
    if (is_init) {
        kill(-1, SIGSTOP);
        return;
    }
    for (size_t i = 0; i < was_stopped->count; i++)
        if (is_member(was_stopped, &was_stopped->at[i], NULL, MAX_DEPTH))
            kill(was_stopped->at[i].pid, SIGSTOP);
}

/* Continues also what does not look stopped: a SIGSTOP may still be on its way, and SIGCONT takes it back. */
static void thaw(struct table *now, struct table *was_stopped) {
    scan(now, NULL);
    for (size_t i = 0; i < now->count; i++) {
        struct process *process = &now->at[i], *before = find_process(was_stopped, process->pid);
        bool own_wish = before && before->stopped && before->started == process->started;
        if (!process->dead && !own_wish && is_member(now, process, NULL, MAX_DEPTH))
            kill(process->pid, SIGCONT);
    }
}

/* Nothing is reaped meanwhile: the pids of our children stay theirs,
 * and a fork bomb's zombies use up its own process limit. */
size_t kill_processes(const struct run *run) {
    static struct table was_stopped;
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
        if (!alive) {
            /* A process that forked once the listing had passed, and died before it was read, hides its
             * child from a scan: one is believed if nobody forked meanwhile. Where others always do (or
             * in the machine's own pid namespace), so many in a row are. */
            if ((last >= 0 && last == last_pid()) || ++unsure == MAX_UNSURE)
                break;
            continue;
        }
        unsure = 0;
        if (!found) {
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL); /* they are dying */
        } else if (pass + 1 >= FREE_PASSES && !frozen) {
            freeze(&was_stopped);
            frozen = true;
        }
    }
    if (frozen)
        thaw(&tables[0], &was_stopped);
    return killed;
}
