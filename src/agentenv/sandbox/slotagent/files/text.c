/* Making text and looking at it. See text.h. */
#define _GNU_SOURCE
#include "text.h"

#include "io.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- text in the making ---- */

void add(struct text *text, const char *bytes, size_t count) {
    if (count > text->room - text->count) {
        text->room = text->count + count > 2 * text->room ? text->count + count + 256 : 2 * text->room;
        if (!(text->bytes = realloc(text->bytes, text->room)))
            fail(ENOMEM);
    }
    if (count)
        memcpy(text->bytes + text->count, bytes, count);
    text->count += count;
}

void addf(struct text *text, const char *format, ...) {
    char *made;
    va_list arguments;
    va_start(arguments, format);
    int bytes = vasprintf(&made, format, arguments);
    va_end(arguments);
    if (bytes < 0)
        fail(ENOMEM);
    add(text, made, (size_t)bytes);
    free(made);
}

/* The length of the UTF-8 character at `at`; 0 when there is none. */
static size_t character(const unsigned char *at, size_t left) {
    size_t length = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : at[0] < 0xf5 ? 4 : 0;
    if (length > left)
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xf0 && at[1] < 0x90);
    bool beyond = (at[0] == 0xed && at[1] > 0x9f) || (at[0] == 0xf4 && at[1] > 0x8f);
    return length > 1 && (overlong || beyond) ? 0 : length;
}

void add_shown(struct text *text, const char *bytes, size_t count, size_t max_characters) {
    for (size_t at = 0, shown = 0; at < count; shown++) {
        if (shown >= max_characters) {
            add(text, "...", 3);
            return;
        }
        size_t length = character((const unsigned char *)bytes + at, count - at);
        if (length) {
            add(text, bytes + at, length);
        } else {
            addf(text, "\\x%02x", (unsigned char)bytes[at]);
            shown += 3;
        }
        at += length ? length : 1;
    }
}

_Noreturn void explain(int code, const struct text *text) {
    struct record record = {.kind = 'w', .size = text->count};
    put(&record, sizeof record);
    put(text->bytes, text->count);
    flush();
    _exit(code);
}

void *with_room(void *items, size_t count, size_t item_bytes) {
    if (count & (count - 1))
        return items; /* room is made at powers of two */
    if (!(items = realloc(items, (count ? 2 * count : 1) * item_bytes)))
        fail(ENOMEM);
    return items;
}

/* ---- pieces of text ---- */

bool begins_with(struct bytes bytes, const char *text) {
    size_t count = strlen(text);
    return bytes.count >= count && !memcmp(bytes.at, text, count);
}

bool equals(struct bytes bytes, const char *text) {
    return bytes.count == strlen(text) && !memcmp(bytes.at, text, bytes.count);
}

struct bytes without_start(struct bytes all, size_t skipped) {
    return skipped > all.count ? (struct bytes){all.at, 0} : (struct bytes){all.at + skipped, all.count - skipped};
}

struct bytes without_end(const char *at, size_t count, const char *ends) {
    while (count && strchr(ends, at[count - 1]) && at[count - 1])
        count--;
    return (struct bytes){at, count};
}
