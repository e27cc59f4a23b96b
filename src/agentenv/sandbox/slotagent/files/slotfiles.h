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
    DOES_NOT_FIT = 206, NO_PATCH = 207, /* of `patch`, which says why */
};
enum { PATH_BYTES = 8192, CHUNK = 65536, SUM_BLOCK = 64, SUM_BYTES = 32 };
#define CHUNKED UINT64_MAX /* a size: content comes as `u32 bytes, bytes` until a zero, and its SHA-256 */
#define BROKEN_OFF UINT32_MAX /* a chunk's size: the sender failed; `u32 code` follows, and nothing else */

/* Followed by the path and the link's target; in an archive and for 'f', content follows. */
struct record {
    uint8_t kind; /* f(ile) d(irectory) l(ink) o(ther) m(ode of a directory made before) h(it) p(atched) w(hy) x e(nd) */
    uint8_t truncated; /* of 'e': the limit cut the list */
    uint16_t mode;
    uint32_t path_bytes, link_bytes, zero;
    uint64_t size;
    int64_t modified_ns;
};

extern const char *root_name;
extern int root;

/* What is told of a failure on stdout, for who asked for a stream: 'x' records (size: the code, path: where),
 * or a broken-off chunk. */
enum telling { TELL_NOTHING, TELL_RECORD, TELL_CHUNK };
extern enum telling telling;
extern char failing_path[PATH_BYTES];

extern void (*undo)(void); /* called first by fail(): takes back what is half done */
_Noreturn void fail(int code);
uint64_t number(const char *text);

struct sum { uint32_t state[8]; uint64_t bytes; unsigned char block[SUM_BLOCK]; };
void sum_begin(struct sum *sum);
void sum_add(struct sum *sum, const void *bytes, size_t count);
void sum_end(struct sum *sum, unsigned char digest[SUM_BYTES]);

/* A walk over a tree, names sorted, links not followed. `file` is called for every regular file, opened; without
 * it entries are listed. */
struct walk {
    void (*file)(struct walk *walk, int fd);
    bool summed, hidden, full, tolerant, skips_git; /* tolerant: what cannot be opened is counted, not fatal */
    uint64_t depth, entries_left, bytes_left, unreadable;
    const char *glob;
    char path[PATH_BYTES];
};
void run_walk(struct walk *walk, const char *path);
void archive_file(struct walk *walk, int fd);

/* A transfer is long, and nobody's next move waits for it: calls of every slot go first. */
void be_patient(void);
void run_send(const char *path, uint64_t max_entries);
void run_receive(const char *path);
void run_patch(const char *path, const char *strip, uint64_t fuzz, uint64_t bytes);
void run_search(const char *path, const char *flags, uint64_t limit, const char *glob, const char *needle,
                const char *pattern);
void run_extract(const char *path);

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

/* A new file with that content that is to take `place`: open and without a name (a kill leaves nothing), or, where the file system
 * has no such files, closed (-1) and with a temporary name. Fails with an errno, as give_name does. */
int stage(const struct place *place, mode_t mode, const char *content, size_t bytes, char name[32], int *fd);
int give_name(int fd, int directory, const char *name);
void random_name(char name[32]);

/* Puts `bytes` of stdin at `place`, all or nothing: a full disk leaves the old file as it was. */
extern uint64_t stored_bytes; /* the sum over every file stored */
void store(const struct place *place, mode_t mode, uint64_t bytes, const int64_t *modified_ns);

#endif
