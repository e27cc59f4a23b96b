/* The root of an image slot: what is mounted, and where. */
#pragma once

#include <stdbool.h>

struct root {
    const char *place, *lower, *programs, *etc, *hostname, *shm_bytes, *terminals;
    bool nested; /* programs of the slot may make user namespaces */
};

/* Mounts it in our mount namespace, which no other process has, makes it our root, and forgets the old one. We are root of
 * the user namespace that owns the mount namespace. */
void enter_root(const struct root *root);
