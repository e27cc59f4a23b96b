/* A hash table of texts. See numbers.h. */
#define _GNU_SOURCE
#include "numbers.h"

#include "io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static uint64_t seed; /* the author of the texts must not choose where they fall */

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

void open_numbers(struct numbers *numbers, size_t most) {
    size_t slots = 16;
    while (slots < 2 * most)
        slots *= 2;
    *numbers = (struct numbers){.texts = malloc((most + 1) * sizeof *numbers->texts),
                                .slots = calloc(slots, sizeof *numbers->slots), .mask = slots - 1};
    if (!numbers->texts || !numbers->slots || (!seed && getrandom(&seed, sizeof seed, 0) != sizeof seed))
        fail(ENOMEM);
}

void close_numbers(struct numbers *numbers) {
    free(numbers->texts);
    free(numbers->slots);
}

/* Where the text's number is, or 0 where it would be. */
static uint32_t *slot_of(const struct numbers *numbers, const char *text, size_t bytes) {
    for (size_t at = hashed(text, bytes) & numbers->mask;; at = (at + 1) & numbers->mask) {
        uint32_t *slot = &numbers->slots[at];
        if (!*slot)
            return slot;
        const struct numbered *known = &numbers->texts[*slot - 1];
        if (known->bytes == bytes && !memcmp(known->text, text, bytes))
            return slot;
    }
}

uint32_t find_number(const struct numbers *numbers, const char *text, size_t bytes) {
    return *slot_of(numbers, text, bytes);
}

uint32_t give_number(struct numbers *numbers, const char *text, size_t bytes) {
    uint32_t *slot = slot_of(numbers, text, bytes);
    if (!*slot) {
        numbers->texts[numbers->count++] = (struct numbered){text, bytes};
        *slot = (uint32_t)numbers->count;
    }
    return *slot;
}
