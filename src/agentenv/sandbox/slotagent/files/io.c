/* Buffers around stdin and stdout, and failing. See io.h. */
#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(sizeof(struct record) == 32, "the record is 32 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, unswapped");

static char input[CHUNK], output[CHUNK];
static size_t input_at, input_end, output_end;
static struct { enum telling how; char path[PATH_BYTES]; void (*undo)(void); } failing;

/* ---- stdin and stdout ---- */

void flush(void) {
    for (size_t at = 0; at < output_end;) {
        ssize_t wrote = write(1, output + at, output_end - at);
        if (wrote < 0 && errno != EINTR)
            fail(errno);
        at += wrote > 0 ? (size_t)wrote : 0;
    }
    output_end = 0;
}

void put(const void *bytes, size_t count) {
    for (const char *from = bytes; count;) {
        size_t part = count < CHUNK - output_end ? count : CHUNK - output_end;
        memcpy(output + output_end, from, part);
        output_end += part, from += part, count -= part;
        if (output_end == CHUNK)
            flush();
    }
}

size_t take_some(const char **bytes, uint64_t wanted) {
    while (input_at == input_end) {
        ssize_t got = read(0, input, sizeof input);
        if (got == 0)
            fail(INPUT_CUT_SHORT);
        if (got < 0 && errno != EINTR)
            fail(errno);
        input_at = 0;
        input_end = got > 0 ? (size_t)got : 0;
    }
    size_t part = wanted < input_end - input_at ? (size_t)wanted : input_end - input_at;
    *bytes = input + input_at;
    input_at += part;
    return part;
}

void take(void *into, size_t count) {
    for (char *to = into; count;) {
        const char *bytes;
        size_t part = take_some(&bytes, count);
        memcpy(to, bytes, part);
        to += part, count -= part;
    }
}

uint64_t number(const char *text) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end || *text < '0' || *text > '9')
        fail(USAGE);
    return value;
}

/* ---- failing ---- */

void tell_failures(enum telling how) {
    failing.how = how;
}

void blame(const char *path) {
    snprintf(failing.path, sizeof failing.path, "%s", path);
}

void undo_with(void (*undo)(void)) {
    failing.undo = undo;
}

/* A stream that ends must say why, because its reader knows nothing of exit codes. */
static void tell(int code) {
    enum telling how = failing.how;
    failing.how = TELL_NOTHING; /* writing may fail too */
    uint32_t broken_off[2] = {BROKEN_OFF, (uint32_t)code};
    struct record record = {.kind = 'x', .path_bytes = (uint32_t)strlen(failing.path), .size = (uint64_t)code};
    if (how == TELL_CHUNK) {
        put(broken_off, sizeof broken_off);
    } else {
        put(&record, sizeof record);
        put(failing.path, record.path_bytes);
    }
    flush();
}

_Noreturn void fail(int code) {
    void (*undo)(void) = failing.undo;
    failing.undo = NULL; /* undoing may fail too */
    if (undo)
        undo();
    if (failing.how != TELL_NOTHING)
        tell(code);
    const char *text = code < 128 ? strerror(code) : "refused";
    if (write(2, text, strlen(text)) < 0 || write(2, "\n", 1) < 0) {}
    _exit(code > 0 && code < 128 ? code : code >= OUTSIDE && code <= NO_RIPGREP ? code : EIO);
}
