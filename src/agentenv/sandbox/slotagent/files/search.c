/* Searching files for lines. See search.h.
 *
 * One ripgrep, the lister, names the files; another, the finder, finds the lines. In between each file is opened, and
 * sent to the finder if it is to be searched, all of them as one stream: `hits` has the lines' files. */
#define _GNU_SOURCE
#include "search.h"

#include "hits.h"
#include "io.h"
#include "paths.h"
#include "ripgrep.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_SEARCHED = 64 << 20, BINARY_PROBE = 65536, SENT_AT_ONCE = 64 << 10, COUNTED = 128 };

static struct ripgrep lister, finder;
static bool finder_ended; /* it found an error, or it is not needed any more */
static char *text;        /* what is to be sent */
static size_t text_room, text_bytes;
static uint64_t next_line = 1;
static struct left_out left_out;

/* ---- the finder ---- */

static void start_finder(const char *program, const char *flags, const char *glob, const char *pattern, int directory) {
    const char *argv[20] = {program, "--no-config", "--text", "--encoding=none", "--threads=1", "--color=never",
                            "--no-heading", "--no-filename", "--line-number", "--column",
                            "--field-match-separator=\\n;"}; /* as take_hits reads it */
    size_t count = 11;
    char *regexp;
    if (asprintf(&regexp, "--regexp=%s", pattern) < 0)
        fail(ENOMEM);
    if (strchr(flags, 'i'))
        argv[count++] = "--ignore-case";
    if (strchr(flags, 'F'))
        argv[count++] = "--fixed-strings";
    argv[count++] = glob; /* it is of no use here, but a mistake in it ends this one with 2 and a message */
    argv[count++] = regexp;
    argv[count++] = "-";
    start_ripgrep(&finder, argv, directory);
    free(regexp);
}

static void take_found(void) {
    char printed[CHUNK];
    ssize_t got = read(finder.output, printed, sizeof printed);
    if (got < 0 && errno != EINTR)
        fail(errno);
    if (got > 0)
        take_hits(printed, (size_t)got);
    finder_ended = !got || too_many_hits();
}

/* Sends what is to be sent, and takes what is found in between, or each would wait for the other. */
static void send_text(void) {
    for (size_t sent = 0; sent < text_bytes && !finder_ended;) {
        struct pollfd ends[2] = {{.fd = finder.output, .events = POLLIN}, {.fd = finder.input, .events = POLLOUT}};
        if (poll(ends, 2, -1) < 0 && errno != EINTR)
            fail(errno);
        if (ends[0].revents)
            take_found();
        ssize_t wrote = ends[1].revents ? write(finder.input, text + sent, text_bytes - sent) : 0;
        if (wrote < 0 && errno == EPIPE)
            finder_ended = true; /* it printed why */
        else if (wrote < 0 && errno != EAGAIN && errno != EINTR)
            fail(errno);
        sent += wrote > 0 ? (size_t)wrote : 0;
    }
    text_bytes = 0;
}

/* ---- files ---- */

/* Reads a file behind what is to be sent, up to its end or `size` (0: not known). What was read, or -1 when it is not
 * to be searched. */
static ssize_t read_file(int fd, off_t size) {
    size_t bytes = 0;
    for (bool probed = false, whole = false;;) {
        if (text_room - text_bytes < bytes + BINARY_PROBE + 1
            && !(text = realloc(text, text_room = 2 * text_room + 2 * BINARY_PROBE)))
            fail(ENOMEM);
        char *begin = text + text_bytes;
        ssize_t got = read(fd, begin + bytes, text_room - text_bytes - bytes - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            left_out.unreadable++;
            return -1;
        }
        bytes += (size_t)got;
        whole = !got || (size && bytes >= (size_t)size);
        if (!probed && (whole || bytes >= BINARY_PROBE)) {
            probed = true;
            if (memchr(begin, 0, bytes < BINARY_PROBE ? bytes : BINARY_PROBE)) {
                left_out.binary++;
                return -1;
            }
        }
        if (bytes > MAX_SEARCHED) {
            left_out.large++;
            return -1;
        }
        if (whole)
            return (ssize_t)bytes;
    }
}

static uint64_t newlines(const char *bytes, size_t count) {
    uint64_t found = 0;
    for (; count >= COUNTED; bytes += COUNTED, count -= COUNTED) {
        uint8_t part = 0; /* of a fixed number of bytes: compilers make vector instructions of that, 10 times as fast */
        for (size_t i = 0; i < COUNTED; i++)
            part = (uint8_t)(part + (bytes[i] == '\n'));
        found += part;
    }
    for (size_t i = 0; i < count; i++)
        found += bytes[i] == '\n';
    return found;
}

/* Counts the lines of `bytes` at `begin`, where there is room for one more, without the byte order mark and without the
 * \r of their ends, and ends the last one. Gives their size then. */
static size_t plain_lines(char *begin, size_t bytes, uint64_t *lines) {
    size_t to = 0;
    if (bytes && begin[bytes - 1] == '\n' && *begin != '\xef' && !memchr(begin, '\r', bytes)) {
        *lines += newlines(begin, bytes);
        return bytes; /* nearly all files are plain already */
    }
    for (size_t from = bytes >= 3 && !memcmp(begin, "\xef\xbb\xbf", 3) ? 3 : 0; from < bytes; ++*lines) {
        const char *newline = memchr(begin + from, '\n', bytes - from);
        size_t length = newline ? (size_t)(newline - (begin + from)) : bytes - from;
        size_t kept = length - (length && begin[from + length - 1] == '\r');
        if (to != from)
            memmove(begin + to, begin + from, kept);
        to += kept;
        begin[to++] = '\n';
        from += length + 1;
    }
    return to;
}

static void search_file(const char *path, int fd, off_t size) {
    ssize_t bytes = read_file(fd, size);
    if (bytes < 0)
        return;
    add_searched(path, next_line, &left_out);
    text_bytes += plain_lines(text + text_bytes, (size_t)bytes, &next_line);
    if (text_bytes >= SENT_AT_ONCE)
        send_text();
}

static void open_and_search(int directory, const char *path) {
    struct stat found;
    int fd = open_beneath(directory, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        left_out.unreadable += errno != ENOENT;
    else if (!fstat(fd, &found) && S_ISREG(found.st_mode))
        search_file(path, fd, found.st_size);
    if (fd >= 0)
        close(fd);
}

/* ---- trees ---- */

/* What the lister could not list: it prints a line for each. */
static void count_unlisted(void) {
    size_t bytes;
    char *errors = ripgrep_errors(&lister, &bytes);
    for (const char *line = errors; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        left_out.unreadable += !strncmp(line, "rg: ", 4);
    }
    free(errors);
}

static void search_tree(const char *program, const char *glob, int directory) {
    const char *argv[] = {program, "--no-config", "--files", "--no-ignore", "--hidden", "--sort=path", "--null",
                          "--color=never", glob, "--glob=!**/.git/", NULL};
    start_ripgrep(&lister, argv, directory);
    char *name = NULL;
    size_t room = 0;
    FILE *names = fdopen(dup(lister.output), "r");
    if (!names)
        fail(errno);
    while (!finder_ended && getdelim(&name, &room, 0, names) > 0)
        open_and_search(directory, name);
    free(name);
    fclose(names);
    end_ripgrep(&lister, finder_ended);
    if (!too_many_hits())
        count_unlisted();
}

/* ---- the whole ---- */

_Noreturn static void refuse(void) {
    size_t bytes;
    char *why = ripgrep_errors(&finder, &bytes);
    struct record record = {.kind = 'w', .size = bytes};
    put(&record, sizeof record);
    put(why, bytes);
    flush();
    _exit(BAD_PATTERN);
}

void run_search(const char *path, const char *program, const char *flags, uint64_t limit, const char *glob,
                const char *pattern) {
    struct stat found;
    char *globs;
    int fd = open_beneath(root(), from_root(path), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (!S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode))
        fail(NOT_REGULAR);
    if (asprintf(&globs, "--glob=%s", *glob ? glob : "**") < 0)
        fail(ENOMEM);
    limit_hits(limit);
    start_finder(program, flags, globs, pattern, root());
    if (S_ISDIR(found.st_mode))
        search_tree(program, globs, fd);
    else
        search_file("", fd, found.st_size);
    free(globs);
    send_text();
    close(finder.input), finder.input = -1;
    while (!finder_ended)
        take_found();
    if (end_ripgrep(&finder, too_many_hits()) == 2)
        refuse();
    end_hits();
    uint64_t files = searched_files(&left_out);
    struct record end = {.kind = 'e', .truncated = too_many_hits()};
    put(&end, sizeof end);
    put((uint64_t[4]){files, left_out.binary, left_out.large, left_out.unreadable}, 4 * sizeof(uint64_t));
}
