/* Starting a process of a run. */
#ifndef CHILD_H
#define CHILD_H

#include <stdbool.h>
#include <sys/types.h>

/* What a start failed at, as reported to the server. */
enum step { STEP_RESOURCES = 1, STEP_CWD = 2, STEP_EXEC = 3 };

struct beginning {
    const char *cwd;
    const char *program; /* looked up in PATH when it has no slash */
    char *const *argv, *const *env;
    const int *from; /* what becomes its descriptors 0, 1, 2 and (or -1) 9; nothing else is open in it */
    bool terminal;   /* the one that 1 is becomes its session's own */
};

/* Returns its pid, or -1 with what failed in *error (an errno) and *step. */
pid_t start_child(const struct beginning *beginning, int *error, int *step);

#endif
