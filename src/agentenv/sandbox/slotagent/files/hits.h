/* The lines that ripgrep finds in a stream of files: each is printed with its file, as an 'h' record. */
#ifndef HITS_H
#define HITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Files that were not searched. */
struct left_out { uint64_t binary, large, unreadable; };

/* At most so many lines are printed. */
void limit_hits(uint64_t limit);

/* The stream's lines from this one on, counted from 1, are this file's. `before`: what was left out before it. */
void add_searched(const char *path, uint64_t first_line, const struct left_out *before);

/* What ripgrep printed, in parts: for each line its number; a newline, ';' and the column of its first match, if
 * ripgrep can say it; a newline, ';' and its text; a newline. No text has a newline, so none can pretend to be more. */
void take_hits(const char *printed, size_t bytes);

/* The end of it. */
void end_hits(void);

/* Whether there was one more than the limit. */
bool too_many_hits(void);

/* How many files were searched. If there were too many hits, both end with the file of the one that was too many. */
uint64_t searched_files(struct left_out *left_out);

#endif
