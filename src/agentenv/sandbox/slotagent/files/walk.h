/* A walk over a tree: depth first, names sorted, links not followed. */
#ifndef WALK_H
#define WALK_H

#include "io.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

struct walk {
    void (*file)(struct walk *walk, int fd); /* called for every regular file, opened; NULL: entries are listed */
    bool summed;                             /* a transfer: the root has a record too, and content a sum */
    bool hidden;                             /* names that begin with a dot are wanted too */
    bool full;                               /* there was more than the limit */
    uint64_t depth, entries_left, bytes_left;
    char path[PATH_BYTES]; /* of the entry at hand */
};

void run_walk(struct walk *walk, const char *path);

/* The record of the entry at hand. */
void put_entry(const struct walk *walk, char kind, const struct stat *found, const char *link, size_t link_bytes);

#endif
