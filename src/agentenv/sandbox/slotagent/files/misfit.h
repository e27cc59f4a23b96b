/* Why a hunk does not fit, in words that help its author to correct it. */
#ifndef MISFIT_H
#define MISFIT_H

#include "lines.h"
#include "text.h"

/* The hunk, whose rows are in `target`, fits nowhere at or after line `taken`. `offset`: by how many lines the hunks
 * before it were moved. */
void explain_misfit(struct target *target, const struct hunk *hunk, size_t taken, int64_t offset, size_t fuzz,
                    struct text *why);

#endif
