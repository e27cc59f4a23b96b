/* Placing hunks. See hunks.h. */
#define _GNU_SOURCE
#include "hunks.h"

#include "io.h"
#include "lines.h"
#include "misfit.h"

#include <errno.h>
#include <stdlib.h>

enum { SHOWN_HEADER = 200 };

/* ---- a hunk's place ---- */

/* Where it goes and what it replaces there: with `front` and `back` lines of its context left out. `tolerant`: its old
 * lines have other ends than the file's. */
struct hunk_place { size_t start, replaced, front, back, fuzz; bool tolerant; };

static bool say_ambiguous(const struct places *places, struct text *why) {
    addf(why, "is ambiguous: it matches at %zu places (lines ", places->count);
    for (size_t i = 0; i < places->count && i < SHOWN_PLACES; i++)
        addf(why, "%s%zu", i ? ", " : "", places->first[i] + 1);
    addf(why, "); add context lines or line numbers");
    return false;
}

static bool find_insertion(const struct target *target, const struct hunk *hunk, size_t taken, int64_t offset,
                           struct hunk_place *place, struct text *why) {
    *place = (struct hunk_place){0};
    if (hunk->start < 0) {
        if (target->count)
            addf(why, "has neither context lines nor a line number to place it");
        return !target->count;
    }
    int64_t start = hunk->start + offset;
    if (start < (int64_t)taken || start > (int64_t)target->count) {
        addf(why, "inserts after line %lld, but the file has %zu lines: add context lines", (long long)start,
             target->count);
        return false;
    }
    place->start = (size_t)start;
    return true;
}

/* Where the hunk goes, at or after line `taken`; or false, and why it does not. */
static bool find_hunk(struct target *target, const struct hunk *hunk, size_t taken, int64_t offset, size_t fuzz,
                      struct hunk_place *place, struct text *why) {
    if (!hunk->old)
        return find_insertion(target, hunk, taken, offset, place, why);
    for (size_t level = 0; level <= fuzz; level++) {
        size_t front = least(level, hunk->before), back = least(level, hunk->after);
        if (level && level > hunk->before && level > hunk->after)
            break; /* there is no more context to leave out */
        if (front + back >= hunk->old)
            break;
        const uint32_t *keys = target->old + front;
        size_t count = hunk->old - front - back;
        int64_t expected = hunk->start - 1 + offset + (int64_t)front;
        if (hunk->start < 0)
            expected = ANYWHERE;
        else if (expected < 0)
            expected = 0;
        for (int tolerant = 0; tolerant < 2; tolerant++) {
            *place = (struct hunk_place){.replaced = count, .front = front, .back = back, .fuzz = level,
                                          .tolerant = tolerant};
            if (hunk->start >= 0 && expected >= (int64_t)taken && is_at(target, keys, count, expected, tolerant)) {
                place->start = (size_t)expected;
                return true;
            }
            struct places found = places_of(target, keys, count, taken, tolerant, expected);
            if (hunk->start < 0 && found.count > 1)
                return say_ambiguous(&found, why);
            place->start = hunk->start < 0 ? found.first[0] : found.nearest;
            if (found.count)
                return true;
        }
    }
    explain_misfit(target, hunk, taken, offset, fuzz, why);
    return false;
}

static bool has_crlf(const struct target *target, size_t at) {
    if (at >= target->count)
        at = target->count - 1;
    return target->count && end_of(target->lines[at].key) == END_CRLF;
}

static void add_file_lines(const struct target *target, struct text *text, size_t begin, size_t end) {
    add(text, target->bytes + target->lines[begin].at, target->lines[end].at - target->lines[begin].at);
}

/* Adds what stands there afterwards: context as the file has it, and added lines as the patch has them; but those of a
 * tolerant hunk get the ends that the file has there. */
static void add_merged(
    const struct target *target, struct text *text, const struct hunk *hunk, const struct hunk_place *place) {
    size_t at = place->start;
    for (size_t i = place->front; i < hunk->count - place->back; i++) {
        const struct line *line = &target->patch->lines[hunk->first + i];
        if (line->kind == CONTEXT)
            add_file_lines(target, text, at, at + 1);
        if (line->kind != ADDED) {
            at++;
            continue;
        }
        uint32_t end = end_of(line->key);
        if (end != END_NONE && place->tolerant)
            end = has_crlf(target, least(at, place->start + 1)) ? END_CRLF : END_LF;
        add(text, target->patch->text + line->text, line->bytes);
        add(text, end == END_CRLF ? "\r\n" : "\n", end);
    }
}

/* ---- all of them ---- */

/* Finds the places of all hunks, or prints why one has none. */
static bool find_all(struct target *target, const struct part *part, size_t fuzz, struct hunk_place *places,
                     struct fit *fit, struct text *why) {
    const struct patch *patch = target->patch;
    size_t taken = 0;
    int64_t offset = 0;
    for (size_t i = 0; i < part->hunks; i++) {
        const struct hunk *hunk = &patch->hunks[part->first_hunk + i];
        struct hunk_place *place = &places[i];
        struct text reason = {0};
        take_rows(target, hunk);
        if (!find_hunk(target, hunk, taken, offset, fuzz, place, &reason)) {
            addf(why, "hunk %zu of %zu (", i + 1, part->hunks);
            add_shown(why, patch->text + hunk->header, hunk->header_bytes, SHOWN_HEADER);
            addf(why, ", line %u of the patch) ", hunk->at_line);
            add(why, reason.bytes, reason.count);
            return false;
        }
        taken = place->start + place->replaced;
        if (hunk->start >= 0) {
            offset = (int64_t)place->start - (int64_t)place->front - (hunk->start - (hunk->old ? 1 : 0));
            fit->offset_lines = distance(0, offset) > fit->offset_lines ? distance(0, offset) : fit->offset_lines;
        }
        fit->fuzz = place->fuzz > fit->fuzz ? place->fuzz : fit->fuzz;
    }
    return true;
}

static void merge_all(const struct target *target, const struct part *part, struct hunk_place *places,
                      struct text *done) {
    bool tolerant = false;
    size_t taken = 0;
    for (size_t i = 0; i < part->hunks; i++)
        tolerant |= places[i].tolerant;
    for (size_t i = 0; i < part->hunks; i++) {
        const struct hunk *hunk = &target->patch->hunks[part->first_hunk + i];
        places[i].tolerant |= tolerant && !hunk->old; /* only the other hunks show which ends the patch was given */
        add_file_lines(target, done, taken, places[i].start);
        add_merged(target, done, hunk, &places[i]);
        taken = places[i].start + places[i].replaced;
    }
    add_file_lines(target, done, taken, target->count);
}

bool apply_hunks(const struct patch *patch, const struct part *part, const char *content, size_t bytes, size_t fuzz,
                 struct fit *fit, struct text *why) {
    struct text done = {0};
    struct target target;
    if (bytes >= UINT32_MAX)
        fail(TOO_LARGE);
    *fit = (struct fit){0};
    open_target(&target, patch, part, content, bytes);
    struct hunk_place *places = calloc(part->hunks + 1, sizeof *places);
    if (!places)
        fail(ENOMEM);
    bool fits = find_all(&target, part, fuzz, places, fit, why);
    if (fits)
        merge_all(&target, part, places, &done);
    free(places);
    close_target(&target);
    fit->bytes = done.bytes, fit->count = done.count;
    return fits;
}
