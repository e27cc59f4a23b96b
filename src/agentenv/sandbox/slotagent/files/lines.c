/* Numbering lines and looking for rows of them. See lines.h. */
#define _GNU_SOURCE
#include "lines.h"

#include "io.h"
#include "numbers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers for lines ---- */

static size_t first_line(const struct patch *patch, const struct part *part) {
    return part->hunks ? patch->hunks[part->first_hunk].first : 0;
}

static size_t line_total(const struct patch *patch, const struct part *part) {
    size_t total = 0;
    for (size_t i = 0; i < part->hunks; i++)
        total += patch->hunks[part->first_hunk + i].count;
    return total;
}

/* Each line of the part gets a key. */
static void number_part(const struct patch *patch, const struct part *part, struct numbers *numbers) {
    size_t total = line_total(patch, part);
    open_numbers(numbers, total);
    for (size_t i = 0; i < total; i++) {
        struct line *line = &patch->lines[first_line(patch, part) + i];
        line->key = give_number(numbers, patch->text + line->text, line->bytes) << 2 | end_of(line->key);
    }
}

static void split_file(struct target *target, size_t bytes, const struct numbers *numbers) {
    size_t room = 0, at = 0;
    for (const char *text = target->bytes, *end = text + bytes; text < end; room++)
        text = (text = memchr(text, '\n', (size_t)(end - text))) ? text + 1 : end;
    if (!(target->lines = malloc((room + 1) * sizeof *target->lines)))
        fail(ENOMEM);
    for (target->count = 0; target->count < room; target->count++) {
        const char *text = target->bytes + at, *newline = memchr(text, '\n', bytes - at);
        size_t length = newline ? (size_t)(newline - text) : bytes - at;
        uint32_t end = !newline ? END_NONE : length && text[length - 1] == '\r' ? END_CRLF : END_LF;
        uint32_t number = find_number(numbers, text, length - (end == END_CRLF));
        target->lines[target->count] = (struct file_line){(uint32_t)at, number << 2 | end};
        at += length + (newline != NULL);
    }
    target->lines[target->count] = (struct file_line){(uint32_t)at, 0};
}

static void open_rows(struct target *target, const struct part *part) {
    size_t longest = 0;
    for (size_t i = 0; i < part->hunks; i++)
        if (target->patch->hunks[part->first_hunk + i].count > longest)
            longest = target->patch->hunks[part->first_hunk + i].count;
    target->old = malloc((longest + 1) * sizeof *target->old);
    target->new = malloc((longest + 1) * sizeof *target->new);
    target->borders = malloc((longest + 1) * sizeof *target->borders);
    if (!target->old || !target->new || !target->borders)
        fail(ENOMEM);
}

void open_target(struct target *target, const struct patch *patch, const struct part *part, const char *content,
                 size_t bytes) {
    struct numbers numbers;
    *target = (struct target){.patch = patch, .bytes = content};
    number_part(patch, part, &numbers);
    split_file(target, bytes, &numbers);
    close_numbers(&numbers);
    open_rows(target, part);
}

void close_target(struct target *target) {
    free(target->old), free(target->new), free(target->borders), free(target->lines);
}

void take_rows(struct target *target, const struct hunk *hunk) {
    size_t old = 0, new = 0;
    for (size_t i = 0; i < hunk->count; i++) {
        const struct line *line = &target->patch->lines[hunk->first + i];
        if (line->kind != ADDED)
            target->old[old++] = line->key;
        if (line->kind != REMOVED)
            target->new[new++] = line->key;
    }
}

const char *line_text(const struct target *target, size_t at, size_t *bytes) {
    *bytes = target->lines[at + 1].at - target->lines[at].at;
    return target->bytes + target->lines[at].at;
}

/* ---- places ---- */

size_t least(size_t one, size_t other) {
    return one < other ? one : other;
}

static bool same(uint32_t one, uint32_t other, bool tolerant) {
    return tolerant ? id_of(one) == id_of(other) : one == other;
}

uint64_t distance(size_t at, int64_t expected) {
    int64_t apart = (int64_t)at - expected;
    return (uint64_t)(apart < 0 ? -apart : apart);
}

bool same_end(uint32_t one, uint32_t other) {
    return (end_of(one) == END_NONE) == (end_of(other) == END_NONE);
}

bool is_at(const struct target *target, const uint32_t *keys, size_t count, int64_t place, bool tolerant) {
    if (place < 0 || (size_t)place > target->count || target->count - (size_t)place < count)
        return false;
    const struct file_line *lines = target->lines + place;
    for (size_t i = 0; i < count; i++)
        if (!same(lines[i].key, keys[i], tolerant))
            return false;
    return same_end(lines[count - 1].key, keys[count - 1]);
}

/* For each beginning of the row: the length of the longest end of it that the row also begins with. */
static void find_borders(uint32_t *borders, const uint32_t *keys, size_t count, bool tolerant) {
    size_t length = 0;
    borders[0] = 0;
    for (size_t i = 1; i < count; i++) {
        while (length && !same(keys[i], keys[length], tolerant))
            length = borders[length - 1];
        length += same(keys[i], keys[length], tolerant);
        borders[i] = (uint32_t)length;
    }
}

struct places places_of(struct target *target, const uint32_t *keys, size_t count, size_t taken, bool tolerant,
                        int64_t expected) {
    struct places places = {0};
    size_t length = 0;
    find_borders(target->borders, keys, count, tolerant);
    for (size_t i = taken; i < target->count; i++) {
        uint32_t key = target->lines[i].key;
        while (length && !same(key, keys[length], tolerant))
            length = target->borders[length - 1];
        length += same(key, keys[length], tolerant);
        if (length < count)
            continue;
        size_t at = i + 1 - count;
        length = target->borders[length - 1];
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
