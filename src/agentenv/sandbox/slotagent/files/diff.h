/* Unified diffs, plain and git's. They are read leniently wherever their meaning is plain: the lines of a hunk count
 * more than the numbers in its header, which models get wrong; an empty line is an empty line of context; text before,
 * between and after the parts of the files is skipped, as patch(1) does. */
#ifndef DIFF_H
#define DIFF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_PARTS = 500, NO_STRIP = -1 };
enum { MAX_PATCH_BYTES = 1 << 30 }; /* places in the text are kept in 32 bits, lengths in 30 */

/* How a line ends; the number is the length of that end. */
enum { END_NONE, END_LF, END_CRLF };

/* A line of a hunk. `text` is where it begins in the patch, `bytes` its length without its end; `key` is
 * id << 2 | end, where lines of the same bytes have the same id (0 before they are numbered). */
enum { CONTEXT, REMOVED, ADDED };
struct line { uint32_t text, key; uint32_t bytes : 30, kind : 2; };

/* `first` and `count`: its lines in patch.lines. `old` and `new` count those of either side, `before` and `after` the
 * lines of context at its ends. `start`: the first old line, from 1; -1 when the header has no numbers. */
struct hunk {
    uint32_t at_line, header, header_bytes;
    int64_t start;
    size_t first, count, old, new, before, after;
};

/* The diff's changes to one file. A name is NULL for /dev/null. `mode` is -1 when the patch does not set it. */
struct part {
    uint32_t at_line;
    char *old, *new;
    bool creates, deletes, renames, copies;
    int mode;
    size_t first_hunk, hunks;
};

struct patch {
    const char *text;
    size_t bytes;
    struct part *parts;
    struct hunk *hunks;
    struct line *lines;
    size_t part_count, hunk_count, line_count;
};

/* Finds every part of patch->text, in order. `strip`: how many leading parts of names to take away; NO_STRIP: git's
 * prefixes. Ends the program when the text is no diff. */
void parse_patch(struct patch *patch, int strip);

#endif
