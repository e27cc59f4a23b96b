/* Killing, stopping and signalling the processes of runs. See tree.h. */
#define _GNU_SOURCE
#include "tree.h"

#include "proc.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEPTH = 4096, MAX_PASSES = 200, MAX_UNSURE = 20 };
enum { PAUSE_NS = 1000 * 1000, LONG_PAUSE_NS = 20 * PAUSE_NS };
enum { QUICK_PASSES = 50, PATIENT_PASSES = 100 }; /* a debugger has a second to let go of what was killed */
#ifndef FREE_PASSES /* tests freeze at once; otherwise they would hardly ever see it happen */
#define FREE_PASSES 3
#endif

static struct table tables[2], frozen[2];
static struct table *stopped = &frozen[0]; /* what freeze_slot has stopped is marked as `sent` */

/* ---- what belongs to a run ---- */

static bool after(uint64_t started, pid_t pid, uint64_t than, pid_t than_pid) {
    return started > than || (started == than && pid > than_pid);
}

/* Whether an orphan (its parent is us, and it leads no run) belongs to `of`. A process that never called setsid can
 * still be recognised by its session; for the others there is only the time. */
static bool owns_orphan(const struct run *of, const struct process *orphan) {
    if (orphan->session == of->pid)
        return true;
    if (leads_run(orphan->session) || !after(orphan->started, orphan->pid, of->started, of->pid))
        return false;
    for (const struct run *other = next_run(NULL); other; other = next_run(other))
        if (after(other->started, other->pid, of->started, of->pid)
            && after(orphan->started, orphan->pid, other->started, other->pid))
            return false;
    for (const struct ended_run *other = next_ended_run(NULL); other; other = next_ended_run(other)) {
        if (other->pid == orphan->session)
            return false;
        /* A run that came and went while `of` (a spare shell, for example) was waiting. */
        if (after(other->started, other->pid, of->started, of->pid)
            && orphan->started >= other->started && orphan->started <= other->ended)
            return false;
    }
    return true;
}

/* Whether the process is in the tree to kill: that of a run, or (`of` NULL) ours. The answer is kept in the table.
 * `hops` limits the walk, because parents that are read while processes die may form a circle. */
static bool is_member(struct table *table, struct process *process, const struct run *of, size_t hops) {
    if (process->member >= 0 || !hops)
        return process->member > 0;
    bool member = false;
    struct process *parent = find_process(table, process->parent);
    if (process->pid == own_pid())
        member = false;
    else if (of && process->pid == of->pid)
        member = true;
    else if (process->parent == own_pid() || (!parent && is_init())) /* no parent: it died during the scan */
        member = !of || (!leads_run(process->pid) && owns_orphan(of, process));
    else if (parent && parent != process)
        member = is_member(table, parent, of, hops - 1);
    process->member = member;
    return member;
}

/* ---- stopping ---- */

/* Stops the processes of a group, or (0) all of the slot, except what is stopped already. One by one: a SIGSTOP for many
 * would be passed on to a child that is just being forked, which no scan shows yet, so that it would never be continued.
 * Returns the last scan, in which those that were stopped here, or are marked so in `before`, are marked as `sent`. */
static struct table *stop_each(struct table *before, struct table *spare, pid_t group) {
    size_t found = 1;
    for (int pass = 0; pass < MAX_PASSES && found; pass++) {
        struct table *now = spare;
        scan(now, before);
        found = 0;
        for (size_t i = 0; i < now->count; i++) {
            struct process *process = &now->at[i];
            if (process->dead || process->stopped || process->sent || (group && process->group != group)
                || !is_member(now, process, NULL, MAX_DEPTH))
                continue;
            process->sent = true;
            found += !kill(process->pid, SIGSTOP);
        }
        spare = before;
        before = now;
    }
    return before;
}

/* A stopped process may still be on its way there. */
static void continue_each(const struct table *table) {
    for (size_t i = 0; i < table->count; i++)
        if (table->at[i].sent)
            kill(table->at[i].pid, SIGCONT);
}

void freeze_slot(void) {
    stopped = stop_each(stopped, stopped == &frozen[0] ? &frozen[1] : &frozen[0], 0);
}

void thaw_slot(void) {
    continue_each(stopped);
    stopped->count = 0;
}

/* ---- killing ---- */

/* One pass: SIGKILL for every member that has had none yet. Returns how many those were; *alive counts the members,
 * killed or not, that still run. */
static size_t kill_pass(struct table *table, const struct run *of, size_t *alive) {
    size_t killed = 0;
    *alive = 0;
    for (size_t i = 0; i < table->count; i++) {
        struct process *process = &table->at[i];
        if (process->dead || !is_member(table, process, of, MAX_DEPTH))
            continue;
        ++*alive;
        if (process->sent)
            continue;
        process->sent = true;
        killed += !kill(process->pid, SIGKILL);
    }
    return killed;
}

static bool is_traced(pid_t pid) {
    pid_t found[MAX_TRACERS];
    return add_tracers(pid, found, 0) > 0;
}

/* Whether a process is the slot's. Where we are not init, others are there too, and may trace what is ours. */
static bool is_ours(struct table *table, pid_t pid) {
    for (size_t hops = 0; !is_init() && pid != own_pid() && hops < MAX_DEPTH; hops++) {
        const struct process *process = find_process(table, pid);
        if (!process)
            return false;
        pid = process->parent;
    }
    return is_init() || pid == own_pid();
}

/* A tracer keeps the dead from their parent, and can hold up what was killed on its way out. So it is killed as
 * well, and so is a process that does the same to it. */
static void kill_tracers(struct table *table, pid_t pid) {
    static pid_t found[MAX_TRACERS];
    size_t count = add_tracers(pid, found, 0);
    for (size_t i = 0; i < count; i++)
        if (is_ours(table, found[i])) {
            kill(found[i], SIGKILL);
            count = add_tracers(found[i], found, count);
        }
}

/* Frees what was killed but is held by its tracers. */
static void release(struct table *table, const struct run *of) {
    if (of)
        kill_tracers(table, of->pid);
    for (size_t i = 0; i < table->count; i++)
        if (table->at[i].sent && !table->at[i].dead)
            kill_tracers(table, table->at[i].pid);
}

/* Nothing is reaped during this: the pids of our children stay theirs, and a fork bomb's zombies use up its own
 * process limit. */
size_t kill_processes(const struct run *of) {
    size_t killed = 0, alive = 0;
    int unsure = 0;
    tables[1].count = 0;
    for (int pass = 0; pass < MAX_PASSES; pass++) {
        struct table *now = &tables[pass % 2];
        long children = scan(now, &tables[(pass + 1) % 2]);
        size_t found = kill_pass(now, of, &alive);
        killed += found;
        if (!of && is_init())
            kill(-1, SIGKILL); /* all of them at once: what forked during the pass dies too */
        if (!alive && !(of && is_traced(of->pid))) {
            /* A scan can miss a process whose parent forked and died in between. But a living one descends from a child
             * of ours that lives, and orphans become such children: the scan is believed when none was added since.
             * Where another run's orphans are added all the time, or the kernel does not list children, MAX_UNSURE
             * scans in a row are believed. */
            if ((children >= 0 && children == count_children()) || ++unsure == MAX_UNSURE)
                break;
            continue;
        }
        unsure = 0;
        if (!found) {
            thaw_slot(); /* none can fork any more, and those that trace the dead must be able to let go */
            if (pass >= PATIENT_PASSES)
                release(now, of);
            /* They are dying. On a loaded machine that takes them a turn of its processors: some 0.3 s were seen. */
            nanosleep(&(struct timespec){.tv_nsec = pass < QUICK_PASSES ? PAUSE_NS : LONG_PAUSE_NS}, NULL);
        } else if (pass + 1 >= FREE_PASSES) {
            freeze_slot();
        }
    }
    thaw_slot();
    return killed;
}

/* ---- signalling the foreground ---- */

/* Whether a process of the leader's group belongs to what was begun at `since` and runs in the foreground. */
static bool in_foreground(struct table *table, const struct process *process, const struct run *of, uint64_t since) {
    for (size_t hops = 0; process && process->pid != of->pid && process->pid != own_pid() && hops < MAX_DEPTH; hops++) {
        if (process->started < since || (process->parent == of->pid && process->async))
            return false;
        process = find_process(table, process->parent); /* NULL: an orphan of the foreground */
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
    scan(&tables[0], NULL);
    if (!spares_somebody(&tables[0], of, since)) {
        kill(-of->pid, number);
        return;
    }
    /* Nobody may come or go while they are signalled one by one: a shell whose command was missed would go on. */
    struct table *now = stop_each(&tables[0], &tables[1], of->pid);
    for (size_t i = 0; i < now->count; i++)
        if (now->at[i].group == of->pid && in_foreground(now, &now->at[i], of, since))
            kill(now->at[i].pid, number);
    continue_each(now);
}
