/* What the parts of `slotfiles patch` share: diff.c reads the text, hunks.c finds where its hunks belong,
 * patch.c changes the files. Work and memory are linear in text and files, but for what a hunk that has to be
 * looked for costs: one pass over its file's lines for each amount of context tried. */
#ifndef SLOTPATCH_H
#define SLOTPATCH_H

#include "slotfiles.h"

enum { MAX_PARTS = 500, MAX_FUZZ = 3, NO_STRIP = -1 };
enum { MAX_PATCH_BYTES = 1 << 30 }; /* places in the text are kept in 32 bits, lengths in 30 */

/* How a line ends; the number is the length of that end. */
enum { END_NONE, END_LF, END_CRLF };

/* A line of a hunk. `text` is where it begins in the patch, `bytes` its length without its end; `key` is
 * id << 2 | end, where lines of the same bytes have the same id (0 until it was numbered). */
enum { CONTEXT, REMOVED, ADDED };
struct line { uint32_t text, key; uint32_t bytes : 30, kind : 2; };

/* `first` and `count`: its lines in patch.lines. `old` and `new` count those of either side, `before` and `after`
 * the lines of context at its ends. `start`: the first old line, from 1; -1 when the header has no numbers. */
struct hunk {
    uint32_t at_line, header, header_bytes;
    int64_t start;
    size_t first, count, old, new, before, after;
};

/* A name is NULL for /dev/null. `mode` is -1 when the patch does not set it. */
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

/* Text in the making. */
struct text { char *bytes; size_t count, room; };
void add(struct text *text, const char *bytes, size_t count);
__attribute__((format(printf, 2, 3))) void addf(struct text *text, const char *format, ...);
/* As UTF-8, what is none as \xNN; cut to so many characters. */
void add_shown(struct text *text, const char *bytes, size_t count, size_t max_characters);

/* Ends the program: prints the record 'w' and the text, for whoever wrote the patch. */
_Noreturn void explain(int code, const struct text *text);

/* Room for one more at `items[count]`, in steps that double. */
void *with_room(void *items, size_t count, size_t item_bytes);

/* Every part of patch->text, in order. Ends the program when it is no diff. */
void parse_patch(struct patch *patch, int strip);

/* What became of one file's content. */
struct fit { char *bytes; size_t count; uint64_t fuzz, offset_lines; };

/* `content` with the part's hunks applied; false, and why in `why`, when one does not fit. */
bool apply_hunks(const struct patch *patch, const struct part *part, const char *content, size_t bytes, size_t fuzz,
                 struct fit *fit, struct text *why);

#endif
