/* Storing files so that a full disk or a kill leaves the old file as it was, and nothing beside it.
 *
 * A new file takes the place of the old one, with its owner, mode and extended attributes: no process reads half of it. But
 * where that would make it another file (it has more than one link; its owner or an attribute cannot be given to a new
 * one; its directory takes no new file; something is mounted on it), the old one itself is written over, as a shell's
 * `>` does. Room for all of the content is allocated before. */
#ifndef STORE_H
#define STORE_H

#include "paths.h"

#include <stddef.h>
#include <stdint.h>

enum { KEPT_MODE = -1 }; /* that of the file which is replaced; of a new one, 0644 */

/* Puts `bytes` of stdin (or CHUNKED) at `place`: all of them or nothing. */
void store(const struct place *place, int mode, uint64_t bytes, const int64_t *modified_ns);

/* The sum over all files that store() was given. */
uint64_t stored_bytes(void);

/* New content for a place: a file without a name, so that nothing is left of it when we are killed (`name` is empty);
 * or, where the file system has no such files, with a temporary one. `over`: the old file is to be written over. */
struct staged { int fd; bool over; char name[32]; };

/* Opens one with the attributes of the file at `like` (NULL: a new file's). Returns an errno or 0. When that is `place`
 * itself, it may come to be `over`, and then `fd` may be a file in memory. */
int open_staged(struct staged *staged, const struct place *place, const struct place *like);
int write_staged(struct staged *staged, int mode, const char *content, size_t bytes);

/* Gives it a temporary name in that directory, if it has none. Returns an errno or 0. */
int name_staged(struct staged *staged, int directory);

/* Closes it, and removes it when it has a name. */
void drop_staged(struct staged *staged, int directory);

void random_name(char name[32]);

/* Whether a rename failed because of what is there, so that this can still be written over. */
bool needs_overwrite(int error);

/* Writes over the file at `place`. Returns an errno or 0. Nothing was changed when there is no room. */
int overwrite(const struct place *place, int mode, const char *content, size_t bytes, const int64_t *modified_ns);

#endif
