/* search: the lines of a tree's files that match a regular expression. */
#ifndef SEARCH_H
#define SEARCH_H

#include <stdint.h>

/* `pattern` is a POSIX extended expression: sandbox/tools/search.py has translated it. `flags`: `i` ignores case, `F`
 * takes the pattern as plain text, `-` is neither. `needle`, when not empty, is text that every matching line contains:
 * it is looked for first, because that is a hundred times faster. */
void run_search(const char *path, const char *flags, uint64_t limit, const char *glob, const char *needle,
                const char *pattern);

#endif
