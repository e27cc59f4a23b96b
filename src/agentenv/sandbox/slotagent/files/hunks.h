/* Applying hunks: where each belongs in a file, and what stands there afterwards.
 *
 * A hunk is looked for where its header says (moved by as much as the hunks before it were), then further and further
 * away; first with all of its context, then with up to `fuzz` lines less at each end. Lines that differ only in CR LF
 * against LF count as equal where no others fit: added lines then get the file's own line ends; otherwise the patch's. */
#ifndef HUNKS_H
#define HUNKS_H

#include "diff.h"
#include "text.h"

enum { MAX_FUZZ = 3 };

/* What became of one file's content. */
struct fit { char *bytes; size_t count; uint64_t fuzz, offset_lines; };

/* `content` with the part's hunks applied; false, and why in `why`, when one does not fit. Takes time and memory linear
 * in text and content; but for a hunk that must be looked for, one pass over the lines for each amount of context. */
bool apply_hunks(const struct patch *patch, const struct part *part, const char *content, size_t bytes, size_t fuzz,
                 struct fit *fit, struct text *why);

#endif
