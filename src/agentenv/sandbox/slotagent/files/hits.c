/* Telling the lines that ripgrep finds. See hits.h. */
#define _GNU_SOURCE
#include "hits.h"

#include "io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN = 400, SHOWN_BEFORE = 100 };

struct searched { char *path; uint64_t first_line; struct left_out before; };

/* A printed line, of any length: its first bytes, and those from `from` on. */
struct printed { size_t bytes, from; char first[1 + SHOWN], later[SHOWN]; };

static struct searched *files;
static size_t file_count, file_room, file_at; /* file_at: of the last hit */
static uint64_t limit_left, line_number;
static bool too_many;
static struct printed now, held; /* `held` is a column or a text: that of the next line tells which */

void limit_hits(uint64_t limit) {
    limit_left = limit;
}

void add_searched(const char *path, uint64_t first_line, const struct left_out *before) {
    if (file_count == file_room && !(files = realloc(files, (file_room = file_room * 2 + 64) * sizeof *files)))
        fail(ENOMEM);
    char *copy = strdup(path);
    if (!copy)
        fail(ENOMEM);
    files[file_count++] = (struct searched){.path = copy, .first_line = first_line, .before = *before};
}

bool too_many_hits(void) {
    return too_many;
}

uint64_t searched_files(struct left_out *left_out) {
    if (!too_many)
        return file_count;
    *left_out = files[file_at].before;
    return file_at + 1;
}

/* The text of a line is printed with a ';' in front. */
static void put_hit(const struct printed *line) {
    size_t bytes = line->bytes - 1, from = bytes > SHOWN ? line->from : 0;
    size_t shown = bytes - from < SHOWN ? bytes - from : SHOWN;
    if (!file_count)
        fail(EIO);
    while (file_at + 1 < file_count && files[file_at + 1].first_line <= line_number)
        file_at++;
    const struct searched *file = &files[file_at];
    struct record record = {.kind = 'h', .truncated = shown < bytes, .path_bytes = (uint32_t)strlen(file->path),
                            .link_bytes = (uint32_t)shown, .size = line_number - file->first_line + 1};
    if (!limit_left) {
        too_many = true;
        return;
    }
    limit_left--;
    put(&record, sizeof record);
    put(file->path, record.path_bytes);
    put(from ? line->later : line->first + 1, shown);
}

/* The number in a line, from there on; 0 when it is none. */
static uint64_t number_in(const struct printed *line, size_t from) {
    char digits[24] = "";
    if (line->bytes > from && line->bytes - from < sizeof digits)
        memcpy(digits, line->first + from, line->bytes - from);
    return strtoull(digits, NULL, 10);
}

/* Where the shown part of the next line begins, if it is the text that the held column belongs to. */
static size_t shown_from(void) {
    uint64_t column = held.bytes ? number_in(&held, 1) : 0;
    return column > 1 + SHOWN_BEFORE ? column - 1 - SHOWN_BEFORE : 0;
}

static void end_line(void) {
    bool field = now.bytes && now.first[0] == ';';
    if (field && held.bytes) {
        put_hit(&now);
        held.bytes = 0;
    } else if (field) {
        held = now;
    } else {
        end_hits();
        line_number = number_in(&now, 0);
    }
    now.bytes = 0;
    now.from = shown_from();
}

/* The part of `bytes`, which are at `at` in their line, that belongs at `from` in it. */
static void keep(char *into, size_t room, size_t from, const char *bytes, size_t count, size_t at) {
    size_t begin = from > at ? from - at : 0, end = from + room > at ? from + room - at : 0;
    end = end < count ? end : count;
    if (begin < end)
        memcpy(into + (at + begin - from), bytes + begin, end - begin);
}

void take_hits(const char *printed, size_t bytes) {
    while (bytes && !too_many) {
        const char *newline = memchr(printed, '\n', bytes);
        size_t part = newline ? (size_t)(newline - printed) : bytes;
        keep(now.first, sizeof now.first, 0, printed, part, now.bytes);
        if (now.from)
            keep(now.later, sizeof now.later, 1 + now.from, printed, part, now.bytes);
        now.bytes += part;
        if (newline)
            end_line();
        printed += part + (newline != NULL), bytes -= part + (newline != NULL);
    }
}

void end_hits(void) {
    if (held.bytes)
        put_hit(&held); /* a text without a column */
    held.bytes = 0;
}
