/* Storing files so that a full disk or a kill leaves the old file as it was, and nothing beside it. */
#ifndef STORE_H
#define STORE_H

#include "paths.h"

#include <stddef.h>
#include <stdint.h>

/* Puts `bytes` of stdin (or CHUNKED) at `place`: all of them or nothing. */
void store(const struct place *place, mode_t mode, uint64_t bytes, const int64_t *modified_ns);

/* The sum over all files that store() was given. */
uint64_t stored_bytes(void);

/* Makes a new file with that content, which is to take `place`: open and without a name (so that nothing is left of it
 * when we are killed), or, where the file system has no such files, closed (-1) and with a temporary name. Returns an
 * errno or 0, and so does give_name. */
int stage(const struct place *place, mode_t mode, const char *content, size_t bytes, char name[32], int *fd);
int give_name(int fd, int directory, const char *name);
void random_name(char name[32]);

#endif
