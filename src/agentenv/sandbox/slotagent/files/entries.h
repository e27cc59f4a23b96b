/* What a path names, looked at, made, renamed or removed. */
#ifndef ENTRIES_H
#define ENTRIES_H

#include <stdbool.h>

/* Prints its record, without a path: of what a link at its end leads to, or of the link. */
void run_stat(const char *path, bool follow);

/* With `parents`, missing ones are made too. `exist_ok`: a directory may be there already. */
void run_mkdir(const char *path, bool parents, bool exist_ok);

/* As rename(2): a file at `target` is replaced. */
void run_rename(const char *path, const char *target);

/* Links are removed, not followed. `tree`: a directory with everything in it; without, directories are refused. */
void run_remove(const char *path, bool tree);

#endif
