/* Where a hunk that fits nowhere comes nearest to fitting. See misfit.h. */
#define _GNU_SOURCE
#include "misfit.h"

#include "io.h"
#include "numbers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN_AROUND = 3, MAX_SHOWN = 12, SHOWN_LINE = 120 };
enum { VOTERS = 1000, MAX_VOTES = 50000000 }; /* so that a hunk of equal lines does not take for ever */

/* ---- the nearest place ---- */

static const char *trimmed(const char *text, size_t *bytes) {
    static const char space[] = " \t\n\r\v\f";
    while (*bytes && *text && strchr(space, *text))
        text++, --*bytes;
    while (*bytes && text[*bytes - 1] && strchr(space, text[*bytes - 1]))
        --*bytes;
    return text;
}

/* The old lines of the hunk by the numbers of their texts, white space aside. `head` is the last line with a number,
 * `next` the one before it with the same; lines count from 1, and 0 ends the chain. `heard`: how often the file was
 * found to have it. */
struct voters { struct numbers numbers; uint32_t *head, *next, *heard; };

static void open_voters(struct voters *voters, const struct patch *patch, const struct hunk *hunk) {
    open_numbers(&voters->numbers, hunk->old);
    voters->head = calloc(hunk->old + 1, sizeof *voters->head);
    voters->next = calloc(hunk->old + 1, sizeof *voters->next);
    voters->heard = calloc(hunk->old + 1, sizeof *voters->heard);
    if (!voters->head || !voters->next || !voters->heard)
        fail(ENOMEM);
    uint32_t index = 0;
    for (size_t i = 0; i < hunk->count; i++) {
        const struct line *line = &patch->lines[hunk->first + i];
        size_t bytes = line->bytes;
        const char *text = trimmed(patch->text + line->text, &bytes);
        if (line->kind == ADDED)
            continue;
        index++;
        uint32_t number = bytes ? give_number(&voters->numbers, text, bytes) : 0;
        if (number) {
            voters->next[index] = voters->head[number];
            voters->head[number] = index;
        }
    }
}

static void close_voters(struct voters *voters) {
    free(voters->head), free(voters->next), free(voters->heard);
    close_numbers(&voters->numbers);
}

/* Line `at` of the file votes for each place of the hunk at which one of the hunk's lines would equal it. */
static void vote(const struct target *target, const struct voters *voters, size_t at, uint32_t *votes, size_t *left) {
    size_t bytes;
    const char *text = line_text(target, at, &bytes);
    text = trimmed(text, &bytes);
    uint32_t number = bytes ? find_number(&voters->numbers, text, bytes) : 0;
    if (!number || voters->heard[number]++ >= VOTERS)
        return;
    for (uint32_t index = voters->head[number]; index && *left; index = voters->next[index], --*left)
        if (at >= index - 1)
            votes[at - (index - 1)]++;
}

/* The place where most of the hunk's old lines are where they should be, white space aside: the first of the best.
 * False when none of them is in the file. */
static bool find_nearest(const struct target *target, const struct hunk *hunk, size_t *start) {
    struct voters voters;
    size_t left = MAX_VOTES, best = 0;
    uint32_t *votes = calloc(target->count + 1, sizeof *votes);
    if (!votes)
        fail(ENOMEM);
    open_voters(&voters, target->patch, hunk);
    for (size_t at = 0; at < target->count && left; at++)
        vote(target, &voters, at, votes, &left);
    for (size_t at = 1; at < target->count; at++)
        if (votes[at] > votes[best])
            best = at;
    bool found = target->count && votes[best];
    free(votes);
    close_voters(&voters);
    *start = best;
    return found;
}

/* ---- what is there ---- */

static void add_line(const struct target *target, struct text *why, size_t at, const char *mark) {
    size_t bytes;
    addf(why, "%6zu%s", at + 1, mark);
    if (at >= target->count) {
        addf(why, "(the file ends here)");
        return;
    }
    const char *text = line_text(target, at, &bytes);
    add_shown(why, text, bytes - end_of(target->lines[at].key), SHOWN_LINE);
}

static void show_file(const struct target *target, struct text *why, int64_t at, size_t count) {
    size_t place = at < 0 ? 0 : least((size_t)at, target->count);
    size_t begin = place > SHOWN_AROUND ? place - SHOWN_AROUND : 0;
    size_t end = least(begin + count + 2 * SHOWN_AROUND, target->count);
    for (size_t i = begin; i < end; i++) {
        addf(why, "%s", i > begin ? "\n" : "");
        add_line(target, why, i, "   ");
    }
    if (begin >= end)
        addf(why, "(nothing)");
}

/* The hunk's old lines beside the file's. Of their lines of text those from `first` to `last` are shown; `shown` counts
 * all. */
struct comparison { const struct target *target; struct text *why; size_t shown, first, last; };

static bool begin_shown(struct comparison *shown) {
    size_t at = shown->shown++;
    if (at < shown->first || at >= shown->last)
        return false;
    if (at > shown->first)
        add(shown->why, "\n", 1);
    return true;
}

static bool has_text(const struct target *target, size_t at, uint32_t key) {
    return at < target->count && id_of(target->lines[at].key) == id_of(key);
}

static bool agrees(const struct target *target, size_t at, uint32_t key) {
    return has_text(target, at, key) && same_end(target->lines[at].key, key);
}

static size_t count_agreeing(const struct target *target, const struct hunk *hunk, size_t start) {
    size_t agreeing = 0;
    for (size_t i = 0; i < hunk->old; i++)
        agreeing += agrees(target, start + i, target->old[i]);
    return agreeing;
}

static void compare_line(struct comparison *shown, size_t at, const struct line *line) {
    bool agreeing = agrees(shown->target, at, line->key);
    if (begin_shown(shown))
        add_line(shown->target, shown->why, at, agreeing ? "   " : " ! ");
    if (!agreeing && begin_shown(shown)) {
        addf(shown->why, "       ? ");
        add_shown(shown->why, shown->target->patch->text + line->text, line->bytes, SHOWN_LINE);
        addf(shown->why, "   <- what the patch expects%s", !has_text(shown->target, at, line->key) ? "" :
             end_of(line->key) == END_NONE ? ", without a newline at its end" : ", with a newline at its end");
    }
}

/* When it is long, from a little before the first line that differs. */
static void compare(const struct target *target, const struct hunk *hunk, size_t start, struct text *why) {
    size_t first = 0, total = 2 * hunk->old - count_agreeing(target, hunk, start);
    while (first < hunk->old && agrees(target, start + first, target->old[first]))
        first++;
    bool cut = total > 2 * MAX_SHOWN;
    if (first == hunk->old)
        first = 0;
    struct comparison shown = {.target = target, .why = why, .last = total};
    if (cut) {
        shown.first = first > SHOWN_AROUND ? first - SHOWN_AROUND : 0;
        shown.last = least(shown.first + 2 * MAX_SHOWN, total);
    }
    size_t at = start;
    for (size_t i = 0; i < hunk->count && shown.shown < shown.last; i++) {
        const struct line *line = &target->patch->lines[hunk->first + i];
        if (line->kind != ADDED)
            compare_line(&shown, at++, line);
    }
    if (cut)
        addf(why, "\n       ...");
}

/* Says so when a line differs in nothing but its newline. */
static void explain_newline(const struct target *target, const struct hunk *hunk, size_t start, struct text *why) {
    for (size_t i = 0; i < hunk->old; i++) {
        if (!has_text(target, start + i, target->old[i]) || agrees(target, start + i, target->old[i]))
            continue;
        if (end_of(target->old[i]) == END_NONE)
            addf(why, "\nLine %zu of the file ends with a newline: without '\\ No newline at end of file' below it, the "
                      "line of the patch does, too.", start + i + 1);
        else
            addf(why, "\nThe file's last line has no newline: '\\ No newline at end of file' must be below it in the "
                      "patch. To add lines after it, remove it ('-') and add it again ('+').");
        return;
    }
}

/* Whether all of its lines are there, but for a newline. */
static bool lacks_newline_only(const struct target *target, const struct hunk *hunk, size_t start) {
    for (size_t i = 0; i < hunk->old; i++)
        if (!has_text(target, start + i, target->old[i]))
            return false;
    return count_agreeing(target, hunk, start) < hunk->old;
}

void explain_misfit(struct target *target, const struct hunk *hunk, size_t taken, int64_t offset, size_t fuzz,
                    struct text *why) {
    struct places found = {0};
    size_t start;
    bool near = find_nearest(target, hunk, &start);
    if (hunk->new && !(near && lacks_newline_only(target, hunk, start)))
        found = places_of(target, target->new, hunk->new, 0, true, 0);
    if (found.count) {
        addf(why, "does not apply: it is already applied, at line %zu", found.first[0] + 1);
        return;
    }
    found = places_of(target, target->old, hunk->old, 0, true, 0);
    if (found.count && found.first[0] < taken) {
        addf(why, "does not apply: its lines are at line %zu, before the hunk above it; "
                  "hunks must be in line order and must not overlap", found.first[0] + 1);
        return;
    }
    struct text ignoring = {0};
    if (fuzz)
        addf(&ignoring, ", even without up to %zu lines of context at each end", fuzz);
    add(&ignoring, "", 1);
    if (!near) {
        addf(why, "does not apply: none of its lines are in the file%s.\nThe file contains there:\n", ignoring.bytes);
        show_file(target, why, (hunk->start > 0 ? hunk->start : 1) - 1 + offset, least(hunk->old, MAX_SHOWN));
        return;
    }
    addf(why, "does not apply%s. The closest place is line %zu, where %zu of its %zu old lines match:\n",
         ignoring.bytes, start + 1, count_agreeing(target, hunk, start), hunk->old);
    compare(target, hunk, start, why);
    explain_newline(target, hunk, start, why);
}
