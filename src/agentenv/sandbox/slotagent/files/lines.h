/* The lines of a file and of the hunks for it as numbers, and looking for rows of them.
 *
 * The lines of the part's hunks are numbered, equal ones alike; a line of the file gets the number of the hunks' line
 * that it equals, or 0. To look for a hunk is then Knuth, Morris and Pratt's search for a row of numbers. */
#ifndef LINES_H
#define LINES_H

#include "diff.h"

struct file_line { uint32_t at, key; };

/* A file that a part of the patch is to be applied to, and one hunk of that part. */
struct target {
    const struct patch *patch;
    const char *bytes;
    struct file_line *lines; /* one more than `count`: the last one begins where the file ends */
    size_t count;
    uint32_t *old, *new; /* keys of the hunk's lines, on either side */
    uint32_t *borders;   /* of the row that was looked for last */
};

static inline uint32_t id_of(uint32_t key) {
    return key >> 2;
}

static inline uint32_t end_of(uint32_t key) {
    return key & 3;
}

/* Whether both lines have a newline, or neither has. */
bool same_end(uint32_t one, uint32_t other);

/* Splits the file into lines, and numbers them and those of the part. */
void open_target(struct target *target, const struct patch *patch, const struct part *part, const char *content,
                 size_t bytes);
void close_target(struct target *target);

/* Fills `old` and `new`. */
void take_rows(struct target *target, const struct hunk *hunk);

/* A line of the file as it is. */
const char *line_text(const struct target *target, size_t at, size_t *bytes);

/* Where a row of lines is: how often, the first few places, and the one nearest to what was expected. */
enum { SHOWN_PLACES = 5, ANYWHERE = -1 };
struct places { size_t count, first[SHOWN_PLACES], nearest; };

size_t least(size_t one, size_t other);
uint64_t distance(size_t at, int64_t expected);

/* Whether the row is at that place. `tolerant`: LF and CR LF count as equal. */
bool is_at(const struct target *target, const uint32_t *keys, size_t count, int64_t place, bool tolerant);

/* The places of the row at or after line `taken`: all of them when it is expected ANYWHERE; else those up to the first
 * one after the place where it is expected, since the others are further away. */
struct places places_of(struct target *target, const uint32_t *keys, size_t count, size_t taken, bool tolerant,
                        int64_t expected);

#endif
