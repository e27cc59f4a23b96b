/* Paths, relative to ROOT or absolute. They reach what the slot's user may reach, unless ROOT is a fence: then the
 * kernel keeps every lookup beneath it (openat2, RESOLVE_BENEATH), so neither symlinks nor `..` nor races of the slot's
 * processes lead out of it. What is unpacked is always kept beneath its destination in this way. */
#ifndef PATHS_H
#define PATHS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

void open_root(const char *name, bool fence);

/* Its descriptor, and whether that is its name. */
int root(void);
bool is_root(const char *name);

/* `path` as it is to be opened from ROOT: without ROOT's name in front. Does not return when it names a place outside
 * of a fence. */
const char *from_root(const char *path);

/* -1 with errno on failure; does not return when the path leaves a `base` other than ROOT, or the fence. */
int open_beneath(int base, const char *path, uint64_t flags);

/* Opens a directory, and makes whatever part of it is missing. -1 with errno on failure. */
int make_directories(int base, const char *path);

/* Where a file is to be: an open directory, made if it is missing, and a name in it. Where the name is that of a symlink,
 * find_target gives the place that the link points to (which may not exist yet). find_entry makes no directory, and
 * ignores slashes at the path's end. */
struct place { int directory; char name[256]; bool exists; struct stat found; };
void find_place(int base, const char *path, struct place *place);
void find_entry(const char *path, struct place *place);
void find_target(const char *path, struct place *place);

#endif
