/* Paths below ROOT. The kernel keeps every lookup there (openat2, RESOLVE_BENEATH), so neither symlinks nor `..` nor
 * races of the slot's processes lead out of it. */
#ifndef PATHS_H
#define PATHS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

void open_root(const char *name);

/* Its descriptor, and whether that is its name. */
int root(void);
bool is_root(const char *name);

/* The path below ROOT that `path` names; does not return when it names another. */
const char *below_root(const char *path);

/* -1 with errno on failure; does not return when the path leaves `base`. */
int open_beneath(int base, const char *path, uint64_t flags);

/* Opens a directory, and makes whatever part of it is missing. -1 with errno on failure. */
int make_directories(int base, const char *path);

/* Where a file is to be: an open directory and a name in it. Where the name is that of a symlink, find_target gives the
 * place that the link points to (which may not exist yet). */
struct place { int directory; char name[256]; bool exists; struct stat found; };
void find_place(int base, const char *path, struct place *place);
void find_target(const char *path, struct place *place);

#endif
