/* How a writable layer of overlayfs (mounted with userxattr) differs from a layer of an image (OCI image specification,
 * layer.md). */
#pragma once

#include <stdbool.h>
#include <sys/stat.h>

/* Whether slotroot puts what has this path, relative to the layer, into every root. */
bool is_left_out(const char *path);

/* Whether it is overlayfs' mark of a name that was removed. */
bool is_mark(const struct stat *found);

/* Whether the name would mean a deletion in a layer of an image, which therefore cannot have it. */
bool is_reserved(const char *name);

/* Prints the path, relative to `directory`, of a file with a reserved name; nothing if there is none. Files that the
 * `count` layers `above` it (the lowest first) hide do not count. */
void print_reserved(const char *directory, char **above, int count);
