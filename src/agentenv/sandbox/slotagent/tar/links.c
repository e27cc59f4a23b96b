/* See links.h: a table with open addressing, at most half full. */
#define _GNU_SOURCE
#include "links.h"

#include "steps.h"

#include <stdlib.h>
#include <string.h>

struct link {
    dev_t device;
    ino_t inode;
    char *path; /* NULL: empty */
};

static struct link *table;
static size_t room, used;

static struct link *find(struct link *in, size_t size, dev_t device, ino_t inode) {
    size_t at = (size_t)(inode * 0x9E3779B97F4A7C15ULL) & (size - 1);
    while (in[at].path && (in[at].device != device || in[at].inode != inode))
        at = (at + 1) & (size - 1);
    return &in[at];
}

static void grow(void) {
    size_t larger = room ? 2 * room : 1024;
    struct link *made = calloc(larger, sizeof *made);
    if (!made)
        fail("allocate", "links");
    for (size_t i = 0; i < room; i++)
        if (table[i].path)
            *find(made, larger, table[i].device, table[i].inode) = table[i];
    free(table);
    table = made;
    room = larger;
}

const char *first_name(dev_t device, ino_t inode, const char *path) {
    if (2 * used >= room)
        grow();
    struct link *found = find(table, room, device, inode);
    if (found->path)
        return found->path;
    found->device = device;
    found->inode = inode;
    found->path = strdup(path);
    if (!found->path)
        fail("allocate", "links");
    used++;
    return NULL;
}
