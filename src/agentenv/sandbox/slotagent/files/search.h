/* search: the lines of a tree's files that match a regular expression. */
#ifndef SEARCH_H
#define SEARCH_H

#include <stdint.h>

/* `program` is ripgrep, whose meaning `pattern` and `glob` have. `flags`: `i` ignores case, `F` takes the pattern as
 * plain text, `-` is neither. */
void run_search(const char *path, const char *program, const char *flags, uint64_t limit, const char *glob,
                const char *pattern);

#endif
