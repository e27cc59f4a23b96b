/* Searching files for lines. See search.h. */
#define _GNU_SOURCE
#include "search.h"

#include "io.h"
#include "walk.h"

#include <errno.h>
#include <locale.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SEARCHED = 64 << 20, BINARY_PROBE = 65536, SHOWN = 400, SHOWN_BEFORE = 100 };

static regex_t plain, wide; /* the same pattern for bytes, and for UTF-8 characters */
static bool fixed, has_wide;
static const char *needle_text;
static size_t needle_bytes;
static uint64_t limit_left, searched, binary, large;

/* Where the match begins in `text` (one line, no newline), or -1. */
static regoff_t find_in(const char *text, size_t bytes) {
    if (fixed) {
        const char *found = memmem(text, bytes, needle_text, needle_bytes);
        return found ? (regoff_t)(found - text) : -1;
    }
    bool ascii = true;
    for (size_t i = 0; i < bytes && ascii; i++)
        ascii = (unsigned char)text[i] < 128;
    regmatch_t match = {.rm_so = 0, .rm_eo = (regoff_t)bytes};
    return regexec(ascii || !has_wide ? &plain : &wide, text, 1, &match, REG_STARTEND) ? -1 : match.rm_so;
}

static void put_hit(const struct walk *walk, uint64_t line, const char *text, size_t bytes, size_t at) {
    size_t from = bytes > SHOWN && at > SHOWN_BEFORE ? at - SHOWN_BEFORE : 0;
    size_t shown = bytes - from < SHOWN ? bytes - from : SHOWN;
    struct record record = {.kind = 'h', .truncated = shown < bytes, .path_bytes = (uint32_t)strlen(walk->path),
                            .link_bytes = (uint32_t)shown, .size = line};
    put(&record, sizeof record);
    put(walk->path, record.path_bytes);
    put(text + from, shown);
}

static void search_text(struct walk *walk, const char *text, size_t bytes) {
    const char *end = text + bytes;
    uint64_t line = 1;
    for (const char *at = text; at < end && !walk->full;) {
        if (needle_bytes) { /* skip to the next line that contains it */
            const char *next = memmem(at, (size_t)(end - at), needle_text, needle_bytes);
            if (!next)
                return;
            for (const char *newline; (newline = memchr(at, '\n', (size_t)(next - at))); at = newline + 1)
                line++;
        }
        const char *newline = memchr(at, '\n', (size_t)(end - at)), *stop = newline ? newline : end;
        size_t length = (size_t)(stop - at);
        length -= length && stop[-1] == '\r';
        regoff_t found = find_in(at, length);
        if (found >= 0 && !limit_left) {
            walk->full = true;
        } else if (found >= 0) {
            limit_left--;
            put_hit(walk, line, at, length, (size_t)found);
        }
        at = stop + 1;
        line++;
    }
}

static void search_file(struct walk *walk, int fd) {
    static char *text;
    static size_t room;
    size_t bytes = 0;
    for (;;) {
        if (bytes == room) {
            if (room > MAX_SEARCHED) {
                large++;
                return;
            }
            room = room ? room * 2 : 2 * BINARY_PROBE;
            if (!(text = realloc(text, room)))
                fail(ENOMEM);
        }
        ssize_t got = read(fd, text + bytes, room - bytes);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            walk->unreadable++;
            return;
        }
        if (!got)
            break;
        bytes += (size_t)got;
        if (bytes >= BINARY_PROBE && memchr(text, 0, BINARY_PROBE))
            break;
    }
    if (memchr(text, 0, bytes < BINARY_PROBE ? bytes : BINARY_PROBE)) {
        binary++;
        return;
    }
    if (bytes > MAX_SEARCHED) {
        large++;
        return;
    }
    searched++;
    search_text(walk, text, bytes);
}

static void compile(const char *pattern, int flags) {
    if (regcomp(&plain, pattern, flags))
        fail(ERANGE); /* too large for the library: patterns with mistakes were refused before */
    has_wide = setlocale(LC_CTYPE, "C.UTF-8") && !regcomp(&wide, pattern, flags);
}

void run_search(const char *path, const char *flags, uint64_t limit, const char *glob, const char *needle,
                const char *pattern) {
    static struct walk walk = {.file = search_file, .hidden = true, .tolerant = true, .skips_git = true,
                               .depth = UINT64_MAX, .entries_left = UINT64_MAX};
    fixed = strchr(flags, 'F');
    needle_text = fixed ? pattern : needle;
    needle_bytes = strlen(needle_text);
    limit_left = limit;
    walk.glob = *glob ? glob : NULL;
    if (!fixed)
        compile(pattern, REG_EXTENDED | (strchr(flags, 'i') ? REG_ICASE : 0));
    run_walk(&walk, path);
    struct record end = {.kind = 'e', .truncated = walk.full};
    put(&end, sizeof end);
    put((uint64_t[4]){searched, binary, large, walk.unreadable}, 4 * sizeof(uint64_t));
}
