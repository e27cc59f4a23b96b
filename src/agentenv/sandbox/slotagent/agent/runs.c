/* The table of runs. See runs.h. */
#define _GNU_SOURCE
#include "runs.h"

#include <stddef.h>
#include <time.h>

enum { MAX_ENDED = 256, TICKS_PER_S = 100 };

static struct run runs[MAX_RUNS];
static size_t run_count;
static struct ended_run ended_runs[MAX_ENDED]; /* a ring; pid 0 where it is empty */
static size_t ended_count;                     /* ever: the ring keeps the last MAX_ENDED */

uint64_t ticks_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * TICKS_PER_S + (uint64_t)now.tv_nsec / (1000000000 / TICKS_PER_S);
}

void remember_run(uint32_t id, pid_t pid, uint64_t started) {
    for (size_t i = 0; i < MAX_ENDED; i++)
        if (ended_runs[i].pid == pid) /* the pid is used again, so the old session has long ended */
            ended_runs[i].pid = 0;
    runs[run_count++] = (struct run){id, pid, started};
}

bool end_run(pid_t pid, uint32_t *id) {
    for (size_t i = 0; i < run_count; i++) {
        if (runs[i].pid != pid)
            continue;
        *id = runs[i].id;
        ended_runs[ended_count++ % MAX_ENDED] = (struct ended_run){pid, runs[i].started, ticks_now()};
        runs[i] = runs[--run_count];
        return true;
    }
    return false;
}

const struct run *find_run(uint32_t id) {
    for (size_t i = 0; i < run_count; i++)
        if (runs[i].id == id)
            return &runs[i];
    return NULL;
}

bool leads_run(pid_t pid) {
    for (size_t i = 0; i < run_count; i++)
        if (runs[i].pid == pid)
            return true;
    return false;
}

const struct run *next_run(const struct run *run) {
    run = run ? run + 1 : runs;
    return run < runs + run_count ? run : NULL;
}

const struct ended_run *next_ended_run(const struct ended_run *run) {
    run = run ? run + 1 : ended_runs;
    while (run < ended_runs + MAX_ENDED && !run->pid)
        run++;
    return run < ended_runs + MAX_ENDED ? run : NULL;
}
