/* Where a hunk belongs in a file, and why it does not fit. See slotpatch.h.
 *
 * A hunk is looked for where its header says (moved by as much as the hunks before it were), then ever further away;
 * first with all of its context, then with up to `fuzz` lines less at each end. Lines that differ only in CR LF
 * against LF count as equal: added lines then get the file's own line ends.
 *
 * The lines of the part's hunks are numbered, equal ones alike; a line of the file gets the number of the hunks' line
 * it equals, or 0. Looking for a hunk is then Knuth, Morris and Pratt's search for a row of numbers.
 */
#define _GNU_SOURCE
#include "slotpatch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { SHOWN_AROUND = 3, MAX_SHOWN = 12, SHOWN_LINE = 120, SHOWN_HEADER = 200, SHOWN_PLACES = 5 };
enum { VOTERS = 1000, MAX_VOTES = 50000000 }; /* for the place a hunk that fits nowhere comes nearest to */

struct file_line { uint32_t at, key; };

/* The file at hand; `lines` has one more, which begins at its end. */
static struct { const char *bytes; struct file_line *lines; size_t count; } file;
static const struct patch *patch;
static struct { uint32_t *old, *new, *borders; } row; /* keys of a hunk's lines; room for the longest hunk */

static uint32_t id_of(uint32_t key) {
    return key >> 2;
}

static uint32_t end_of(uint32_t key) {
    return key & 3;
}

/* A line of the file as it is. */
static const char *line_text(size_t at, size_t *bytes) {
    *bytes = file.lines[at + 1].at - file.lines[at].at;
    return file.bytes + file.lines[at].at;
}

static const char *bare_text(size_t at, size_t *bytes) {
    const char *text = line_text(at, bytes);
    *bytes -= end_of(file.lines[at].key);
    return text;
}

/* ---- numbers for lines ---- */

/* Texts that were numbered, in the order of their numbers; number 1 is the first. */
struct numbered { const char *text; size_t bytes; };
struct numbers { struct numbered *texts; uint32_t *slots; size_t count, mask; };

static uint64_t seed; /* whoever chose the lines does not choose where they fall */

static uint64_t hashed(const char *text, size_t bytes) {
    uint64_t hash = seed, part;
    for (; bytes >= sizeof part; text += sizeof part, bytes -= sizeof part) {
        memcpy(&part, text, sizeof part);
        hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    part = bytes;
    if (bytes)
        memcpy((char *)&part + 1, text, bytes);
    hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u;
    return hash ^ hash >> 32;
}

static void open_numbers(struct numbers *numbers, size_t most) {
    size_t slots = 16;
    while (slots < 2 * most)
        slots *= 2;
    *numbers = (struct numbers){.texts = malloc((most + 1) * sizeof *numbers->texts),
                                .slots = calloc(slots, sizeof *numbers->slots), .mask = slots - 1};
    if (!numbers->texts || !numbers->slots || (!seed && getrandom(&seed, sizeof seed, 0) != sizeof seed))
        fail(ENOMEM);
}

static void close_numbers(struct numbers *numbers) {
    free(numbers->texts);
    free(numbers->slots);
}

/* The text's number; when it has none: the next one with `adding`, else 0. */
static uint32_t number_of(struct numbers *numbers, const char *text, size_t bytes, bool adding) {
    for (size_t slot = hashed(text, bytes) & numbers->mask;; slot = (slot + 1) & numbers->mask) {
        uint32_t number = numbers->slots[slot];
        if (!number) {
            if (!adding)
                return 0;
            numbers->texts[numbers->count++] = (struct numbered){text, bytes};
            return numbers->slots[slot] = (uint32_t)numbers->count;
        }
        const struct numbered *known = &numbers->texts[number - 1];
        if (known->bytes == bytes && !memcmp(known->text, text, bytes))
            return number;
    }
}

static size_t first_line(const struct part *part) {
    return part->hunks ? patch->hunks[part->first_hunk].first : 0;
}

static size_t line_total(const struct part *part) {
    size_t total = 0;
    for (size_t i = 0; i < part->hunks; i++)
        total += patch->hunks[part->first_hunk + i].count;
    return total;
}

/* Splits the file into lines, and numbers them and the part's. */
static void number_lines(const struct part *part, size_t bytes) {
    struct numbers numbers;
    size_t total = line_total(part), room = 0;
    open_numbers(&numbers, total);
    for (size_t i = 0; i < total; i++) {
        struct line *line = &patch->lines[first_line(part) + i];
        line->key = number_of(&numbers, patch->text + line->text, line->bytes, true) << 2 | end_of(line->key);
    }
    for (const char *at = file.bytes, *end = at + bytes; at < end; room++)
        at = (at = memchr(at, '\n', (size_t)(end - at))) ? at + 1 : end;
    if (!(file.lines = malloc((room + 1) * sizeof *file.lines)))
        fail(ENOMEM);
    size_t at = 0;
    for (file.count = 0; file.count < room; file.count++) {
        const char *text = file.bytes + at, *newline = memchr(text, '\n', bytes - at);
        size_t length = newline ? (size_t)(newline - text) : bytes - at;
        uint32_t end = !newline ? END_NONE : length && text[length - 1] == '\r' ? END_CRLF : END_LF;
        uint32_t number = number_of(&numbers, text, length - (end == END_CRLF), false);
        file.lines[file.count] = (struct file_line){(uint32_t)at, number << 2 | end};
        at += length + (newline != NULL);
    }
    file.lines[file.count] = (struct file_line){(uint32_t)at, 0};
    close_numbers(&numbers);
}

/* ---- places ---- */

/* Where a row of lines is: how often, the first few places, and the one nearest to what was expected. */
struct places { size_t count, first[SHOWN_PLACES], nearest; };

static bool same(uint32_t one, uint32_t other, bool tolerant) {
    return tolerant ? id_of(one) == id_of(other) : one == other;
}

static uint64_t distance(size_t at, int64_t expected) {
    int64_t apart = (int64_t)at - expected;
    return (uint64_t)(apart < 0 ? -apart : apart);
}

/* Whether the last line has a newline in both, or in neither. */
static bool same_end(uint32_t one, uint32_t other) {
    return (end_of(one) == END_NONE) == (end_of(other) == END_NONE);
}

static bool is_at(const uint32_t *keys, size_t count, int64_t place, bool tolerant) {
    if (place < 0 || (size_t)place > file.count || file.count - (size_t)place < count)
        return false;
    const struct file_line *lines = file.lines + place;
    for (size_t i = 0; i < count; i++)
        if (!same(lines[i].key, keys[i], tolerant))
            return false;
    return same_end(lines[count - 1].key, keys[count - 1]);
}

/* For each beginning of the row, the longest of its ends that the row begins with. */
static void find_borders(const uint32_t *keys, size_t count, bool tolerant) {
    size_t length = 0;
    row.borders[0] = 0;
    for (size_t i = 1; i < count; i++) {
        while (length && !same(keys[i], keys[length], tolerant))
            length = row.borders[length - 1];
        length += same(keys[i], keys[length], tolerant);
        row.borders[i] = (uint32_t)length;
    }
}

/* The places of these lines, at or after line `taken`: every one, or, where one is expected somewhere, those up to
 * the first behind it (others are further away). */
enum { ANYWHERE = -1 };
static struct places places_of(const uint32_t *keys, size_t count, size_t taken, bool tolerant, int64_t expected) {
    struct places places = {0};
    size_t length = 0;
    find_borders(keys, count, tolerant);
    for (size_t i = taken; i < file.count; i++) {
        uint32_t key = file.lines[i].key;
        while (length && !same(key, keys[length], tolerant))
            length = row.borders[length - 1];
        length += same(key, keys[length], tolerant);
        if (length < count)
            continue;
        size_t at = i + 1 - count;
        length = row.borders[length - 1];
        if (!same_end(key, keys[count - 1]))
            continue;
        if (places.count < SHOWN_PLACES)
            places.first[places.count] = at;
        if (!places.count++ || distance(at, expected) < distance(places.nearest, expected))
            places.nearest = at;
        if (expected != ANYWHERE && (int64_t)at >= expected)
            break;
    }
    return places;
}

/* ---- a hunk's place ---- */

/* Where it goes and what it replaces there: `front` and `back` lines of its context left out, `tolerant` of line
 * ends. */
struct place_of_hunk { size_t start, replaced, front, back, fuzz; bool tolerant; };

static void take_rows(const struct hunk *hunk) {
    size_t old = 0, new = 0;
    for (size_t i = 0; i < hunk->count; i++) {
        const struct line *line = &patch->lines[hunk->first + i];
        if (line->kind != ADDED)
            row.old[old++] = line->key;
        if (line->kind != REMOVED)
            row.new[new++] = line->key;
    }
}

static bool say_ambiguous(const struct places *places, struct text *why) {
    addf(why, "is ambiguous: it matches at %zu places (lines ", places->count);
    for (size_t i = 0; i < places->count && i < SHOWN_PLACES; i++)
        addf(why, "%s%zu", i ? ", " : "", places->first[i] + 1);
    addf(why, "); add context lines or line numbers");
    return false;
}

static bool find_insertion(const struct hunk *hunk, size_t taken, int64_t offset, struct place_of_hunk *place,
                           struct text *why) {
    *place = (struct place_of_hunk){0};
    if (hunk->start < 0) {
        if (file.count)
            addf(why, "has neither context lines nor a line number to place it");
        return !file.count;
    }
    int64_t start = hunk->start + offset;
    if (start < (int64_t)taken || start > (int64_t)file.count) {
        addf(why, "inserts after line %lld, but the file has %zu lines: add context lines", (long long)start,
             file.count);
        return false;
    }
    place->start = (size_t)start;
    place->tolerant = true;
    return true;
}

static void explain_misfit(const struct hunk *hunk, size_t taken, int64_t offset, size_t fuzz, struct text *why);

static size_t least(size_t one, size_t other) {
    return one < other ? one : other;
}

/* Where the hunk goes, at or after line `taken`; or false, and why it does not. */
static bool find_place_of(const struct hunk *hunk, size_t taken, int64_t offset, size_t fuzz,
                          struct place_of_hunk *place, struct text *why) {
    if (!hunk->old)
        return find_insertion(hunk, taken, offset, place, why);
    for (size_t level = 0; level <= fuzz; level++) {
        size_t front = least(level, hunk->before), back = least(level, hunk->after);
        if (level && level > hunk->before && level > hunk->after)
            break; /* there is no more context to leave out */
        if (front + back >= hunk->old)
            break;
        const uint32_t *keys = row.old + front;
        size_t count = hunk->old - front - back;
        int64_t expected = hunk->start - 1 + offset + (int64_t)front;
        if (hunk->start < 0)
            expected = ANYWHERE;
        else if (expected < 0)
            expected = 0;
        for (int tolerant = 0; tolerant < 2; tolerant++) {
            *place = (struct place_of_hunk){.replaced = count, .front = front, .back = back, .fuzz = level,
                                            .tolerant = tolerant};
            if (hunk->start >= 0 && expected >= (int64_t)taken && is_at(keys, count, expected, tolerant)) {
                place->start = (size_t)expected;
                return true;
            }
            struct places found = places_of(keys, count, taken, tolerant, expected);
            if (hunk->start < 0 && found.count > 1)
                return say_ambiguous(&found, why);
            place->start = hunk->start < 0 ? found.first[0] : found.nearest;
            if (found.count)
                return true;
        }
    }
    explain_misfit(hunk, taken, offset, fuzz, why);
    return false;
}

static bool has_crlf(size_t at) {
    if (at >= file.count)
        at = file.count - 1;
    return file.count && end_of(file.lines[at].key) == END_CRLF;
}

static void add_file_lines(struct text *text, size_t begin, size_t end) {
    add(text, file.bytes + file.lines[begin].at, file.lines[end].at - file.lines[begin].at);
}

/* What stands there afterwards: context as the file has it, added lines with the file's line ends where those were
 * not the patch's. */
static void add_merged(struct text *text, const struct hunk *hunk, const struct place_of_hunk *place) {
    size_t at = place->start;
    for (size_t i = place->front; i < hunk->count - place->back; i++) {
        const struct line *line = &patch->lines[hunk->first + i];
        if (line->kind == CONTEXT)
            add_file_lines(text, at, at + 1);
        if (line->kind != ADDED) {
            at++;
            continue;
        }
        uint32_t end = end_of(line->key);
        if (end != END_NONE && place->tolerant && hunk->old)
            end = has_crlf(least(at, place->start + 1)) ? END_CRLF : END_LF;
        else if (end != END_NONE && place->tolerant && has_crlf(place->start))
            end = END_CRLF;
        add(text, patch->text + line->text, line->bytes);
        add(text, end == END_CRLF ? "\r\n" : "\n", end);
    }
}

/* ---- why not ---- */

static void add_line_of_file(struct text *why, size_t at) {
    size_t bytes;
    const char *text = bare_text(at, &bytes);
    add_shown(why, text, bytes, SHOWN_LINE);
}

static const char *trimmed(const char *text, size_t *bytes) {
    static const char space[] = " \t\n\r\v\f";
    while (*bytes && *text && strchr(space, *text))
        text++, --*bytes;
    while (*bytes && text[*bytes - 1] && strchr(space, text[*bytes - 1]))
        --*bytes;
    return text;
}

/* The old lines of the hunk at hand by their texts, white space aside: `head` by number, `next` by index. */
struct voters { struct numbers numbers; uint32_t *head, *next, *heard; };

static void vote(const struct voters *voters, size_t at, uint32_t *votes, size_t *left) {
    size_t bytes;
    const char *text = line_text(at, &bytes);
    text = trimmed(text, &bytes);
    uint32_t number = bytes ? number_of((struct numbers *)&voters->numbers, text, bytes, false) : 0;
    if (!number || voters->heard[number]++ >= VOTERS)
        return;
    for (uint32_t index = voters->head[number]; index && *left; index = voters->next[index], --*left)
        if (at >= index - 1)
            votes[at - (index - 1)]++;
}

/* Where most of the hunk's old lines are in the right order, white space aside: the first of the best places. */
static bool find_nearest(const struct hunk *hunk, size_t *start) {
    struct voters voters;
    size_t left = MAX_VOTES, index = 0;
    open_numbers(&voters.numbers, hunk->old);
    voters.head = calloc(hunk->old + 1, sizeof *voters.head);
    voters.next = calloc(hunk->old + 1, sizeof *voters.next);
    voters.heard = calloc(hunk->old + 1, sizeof *voters.heard);
    uint32_t *votes = calloc(file.count + 1, sizeof *votes);
    if (!voters.head || !voters.next || !voters.heard || !votes)
        fail(ENOMEM);
    for (size_t i = 0; i < hunk->count; i++) {
        const struct line *line = &patch->lines[hunk->first + i];
        size_t bytes = line->bytes;
        const char *text = trimmed(patch->text + line->text, &bytes);
        if (line->kind == ADDED)
            continue;
        index++; /* from 1: 0 ends a chain */
        uint32_t number = bytes ? number_of(&voters.numbers, text, bytes, true) : 0;
        if (number) {
            voters.next[index] = voters.head[number];
            voters.head[number] = (uint32_t)index;
        }
    }
    for (size_t at = 0; at < file.count && left; at++)
        vote(&voters, at, votes, &left);
    size_t best = 0;
    for (size_t at = 1; at < file.count; at++)
        if (votes[at] > votes[best])
            best = at;
    bool found = file.count && votes[best];
    free(voters.head), free(voters.next), free(voters.heard), free(votes);
    close_numbers(&voters.numbers);
    *start = best;
    return found;
}

static void add_number(struct text *why, size_t at, const char *mark) {
    addf(why, "%6zu%s", at + 1, mark);
}

static void show_file(struct text *why, int64_t at, size_t count) {
    size_t place = at < 0 ? 0 : least((size_t)at, file.count);
    size_t begin = place > SHOWN_AROUND ? place - SHOWN_AROUND : 0;
    size_t end = least(begin + count + 2 * SHOWN_AROUND, file.count);
    for (size_t i = begin; i < end; i++) {
        addf(why, "%s", i > begin ? "\n" : "");
        add_number(why, i, "   ");
        add_line_of_file(why, i);
    }
    if (begin >= end)
        addf(why, "(nothing)");
}

/* The hunk's old lines beside the file's, from the first that differ; `shown` counts lines of text. */
struct comparison { struct text *why; size_t shown, first, last; };

static bool begin_shown(struct comparison *shown) {
    size_t at = shown->shown++;
    if (at < shown->first || at >= shown->last)
        return false;
    if (at > shown->first)
        add(shown->why, "\n", 1);
    return true;
}

static bool agrees(size_t at, uint32_t key) {
    return at < file.count && id_of(file.lines[at].key) == id_of(key);
}

static void compare_line(struct comparison *shown, size_t at, const struct line *line) {
    if (agrees(at, line->key)) {
        if (begin_shown(shown)) {
            add_number(shown->why, at, "   ");
            add_line_of_file(shown->why, at);
        }
        return;
    }
    if (begin_shown(shown)) {
        add_number(shown->why, at, " ! ");
        if (at < file.count)
            add_line_of_file(shown->why, at);
        else
            addf(shown->why, "(the file ends here)");
    }
    if (begin_shown(shown)) {
        addf(shown->why, "       ? ");
        add_shown(shown->why, patch->text + line->text, line->bytes, SHOWN_LINE);
        addf(shown->why, "   <- what the patch expects");
    }
}

static void compare(struct text *why, const struct hunk *hunk, size_t start) {
    size_t agreeing = 0, first = 0;
    for (size_t i = 0; i < hunk->old; i++)
        agreeing += agrees(start + i, row.old[i]);
    while (first < hunk->old && agrees(start + first, row.old[first]))
        first++;
    size_t total = 2 * hunk->old - agreeing;
    bool cut = total > 2 * MAX_SHOWN;
    if (first == hunk->old)
        first = 0;
    struct comparison shown = {.why = why, .last = total};
    if (cut) {
        shown.first = first > SHOWN_AROUND ? first - SHOWN_AROUND : 0;
        shown.last = least(shown.first + 2 * MAX_SHOWN, total);
    }
    size_t at = start;
    for (size_t i = 0; i < hunk->count && shown.shown < shown.last; i++) {
        const struct line *line = &patch->lines[hunk->first + i];
        if (line->kind != ADDED)
            compare_line(&shown, at++, line);
    }
    if (cut)
        addf(why, "\n       ...");
}

static void explain_misfit(const struct hunk *hunk, size_t taken, int64_t offset, size_t fuzz, struct text *why) {
    struct places found = {0};
    if (hunk->new)
        found = places_of(row.new, hunk->new, 0, true, 0);
    if (found.count) {
        addf(why, "does not apply: it is already applied, at line %zu", found.first[0] + 1);
        return;
    }
    found = places_of(row.old, hunk->old, 0, true, 0);
    if (found.count && found.first[0] < taken) {
        addf(why, "does not apply: its lines are at line %zu, before the hunk above it; "
                  "hunks must be in line order and must not overlap", found.first[0] + 1);
        return;
    }
    struct text ignoring = {0};
    if (fuzz)
        addf(&ignoring, ", even without up to %zu lines of context at each end", fuzz);
    add(&ignoring, "", 1);
    size_t start, equal = 0;
    if (!find_nearest(hunk, &start)) {
        addf(why, "does not apply: none of its lines are in the file%s.\nThe file contains there:\n", ignoring.bytes);
        show_file(why, (hunk->start > 0 ? hunk->start : 1) - 1 + offset, least(hunk->old, MAX_SHOWN));
        return;
    }
    for (size_t i = 0; i < hunk->old; i++)
        equal += agrees(start + i, row.old[i]);
    addf(why, "does not apply%s. The closest place is line %zu, where %zu of its %zu old lines match:\n",
         ignoring.bytes, start + 1, equal, hunk->old);
    compare(why, hunk, start);
}

/* ---- all of them ---- */

static void open_rows(const struct part *part) {
    size_t longest = 0;
    for (size_t i = 0; i < part->hunks; i++)
        if (patch->hunks[part->first_hunk + i].count > longest)
            longest = patch->hunks[part->first_hunk + i].count;
    row.old = malloc((longest + 1) * sizeof *row.old);
    row.new = malloc((longest + 1) * sizeof *row.new);
    row.borders = malloc((longest + 1) * sizeof *row.borders);
    if (!row.old || !row.new || !row.borders)
        fail(ENOMEM);
}

static bool apply_all(const struct part *part, size_t fuzz, struct fit *fit, struct text *done, struct text *why) {
    size_t taken = 0;
    int64_t offset = 0;
    for (size_t i = 0; i < part->hunks; i++) {
        const struct hunk *hunk = &patch->hunks[part->first_hunk + i];
        struct place_of_hunk place;
        struct text reason = {0};
        take_rows(hunk);
        if (!find_place_of(hunk, taken, offset, fuzz, &place, &reason)) {
            addf(why, "hunk %zu of %zu (", i + 1, part->hunks);
            add_shown(why, patch->text + hunk->header, hunk->header_bytes, SHOWN_HEADER);
            addf(why, ", line %u of the patch) ", hunk->at_line);
            add(why, reason.bytes, reason.count);
            return false;
        }
        add_file_lines(done, taken, place.start);
        add_merged(done, hunk, &place);
        taken = place.start + place.replaced;
        if (hunk->start >= 0) {
            offset = (int64_t)place.start - (int64_t)place.front - (hunk->start - (hunk->old ? 1 : 0));
            fit->offset_lines = distance(0, offset) > fit->offset_lines ? distance(0, offset) : fit->offset_lines;
        }
        fit->fuzz = place.fuzz > fit->fuzz ? place.fuzz : fit->fuzz;
    }
    add_file_lines(done, taken, file.count);
    return true;
}

bool apply_hunks(const struct patch *whole, const struct part *part, const char *content, size_t bytes, size_t fuzz,
                 struct fit *fit, struct text *why) {
    struct text done = {0};
    if (bytes >= UINT32_MAX)
        fail(TOO_LARGE);
    patch = whole;
    file.bytes = content;
    *fit = (struct fit){0};
    number_lines(part, bytes);
    open_rows(part);
    bool fits = apply_all(part, fuzz, fit, &done, why);
    free(row.old), free(row.new), free(row.borders), free(file.lines);
    fit->bytes = done.bytes, fit->count = done.count;
    return fits;
}
