/* What the parts of slotfiles share. Whatever fails ends the program: see fail(). */
#ifndef SLOTFILES_H
#define SLOTFILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

/* Exit codes below 128 are errnos; these are our own verdicts. */
enum {
    OUTSIDE = 200, UNSUPPORTED_KERNEL = 201, NOT_REGULAR = 202, INPUT_CUT_SHORT = 203, TOO_LARGE = 204, USAGE = 205,
};
enum { PATH_BYTES = 8192, CHUNK = 65536 };

extern const char *root_name;
extern int root;

_Noreturn void fail(int code);

/* stdin and stdout, buffered. take_some gives up to `wanted` bytes in place, never none. */
void flush(void);
void put(const void *bytes, size_t count);
size_t take_some(const char **bytes, uint64_t wanted);
void take(void *into, size_t count);

/* The path below ROOT that `path` names; does not return when it names another. */
const char *below_root(const char *path);

/* -1 with errno on failure; does not return when the path leaves `base`. */
int open_beneath(int base, const char *path, uint64_t flags);

/* Opens a directory of which any part may be missing, making it. -1 with errno on failure. */
int make_directories(int base, const char *path);

/* Where a file is to be: an open directory and a name in it. find_target, where the name is a symlink,
 * gives the place that points to (which may not exist yet). */
struct place { int directory; char name[256]; bool exists; struct stat found; };
void find_place(int base, const char *path, struct place *place);
void find_target(const char *path, struct place *place);

/* Puts `bytes` of stdin at `place`, all or nothing: a full disk leaves the old file as it was. */
void store(const struct place *place, mode_t mode, uint64_t bytes, const int64_t *modified_ns);

#endif
