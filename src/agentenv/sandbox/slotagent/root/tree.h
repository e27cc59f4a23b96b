/* The root of an image slot: what is mounted, and where. */
#pragma once

#include <stdbool.h>

enum { MAX_VOLUMES = 16, MAX_BINDS = 64 };

/* A directory of the slot's that several of its roots have: in this one at `target`, an absolute path. */
struct volume {
    const char *source, *target;
    bool read_only;
};

/* A file or directory of the container's, with what is mounted below it; read-only at `target`, an absolute path. */
struct bind {
    const char *source, *target;
};

struct root {
    const char *place, *lower, *programs, *etc, *hostname, *shm_bytes, *terminals;
    bool nested; /* programs of the slot may make user namespaces */
    bool fresh;  /* nothing has run in the slot */
    struct volume volumes[MAX_VOLUMES];
    int volume_count;
    struct bind binds[MAX_BINDS];
    int bind_count;
};

/* Mounts it in our mount namespace, which no other process has, makes it our root, and forgets the old one. We are root of
 * the user namespace that owns the mount namespace. */
void enter_root(const struct root *root);
