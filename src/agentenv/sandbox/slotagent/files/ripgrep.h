/* Runs of ripgrep: the program, its input and its output. */
#ifndef RIPGREP_H
#define RIPGREP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* `errors`: a file in memory, for what it prints on stderr. */
struct ripgrep { pid_t pid; int input, output, errors; };

/* Starts argv[0] in a directory. `input` does not block when it is full. Does not return when it cannot be started. */
void start_ripgrep(struct ripgrep *run, const char *const argv[], int directory);

/* Closes both ends and waits: its exit code, 0 (it found something), 1 (it did not) or 2 (an error). Does not return
 * when a signal ended it, unless `stopped`: then it is ended here. */
int end_ripgrep(struct ripgrep *run, bool stopped);

/* What it printed on stderr; the caller frees it. */
char *ripgrep_errors(const struct ripgrep *run, size_t *bytes);

#endif
