/* Reading and making whole trees. See stream.h. */
#define _GNU_SOURCE
#include "stream.h"

#include "io.h"
#include "paths.h"
#include "store.h"
#include "sum.h"
#include "walk.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* A transfer is long, and no model waits for it: the calls of every slot go first. */
static void be_patient(void) {
    if (nice(5) < 0) {} /* only a courtesy */
}

/* ---- out ---- */

/* Content as `u32 bytes, bytes` until a zero, because the file may change while it is read. */
static void put_content(struct walk *walk, int fd) {
    char chunk[CHUNK];
    unsigned char digest[SUM_BYTES];
    struct sum sum;
    sum_begin(&sum);
    for (;;) {
        ssize_t got = read(fd, chunk, sizeof chunk);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            fail(errno);
        if ((uint64_t)got > walk->bytes_left)
            fail(TOO_LARGE);
        walk->bytes_left -= (uint64_t)got;
        uint32_t bytes = (uint32_t)got;
        put(&bytes, sizeof bytes);
        put(chunk, bytes);
        if (!got)
            break;
        if (walk->summed)
            sum_add(&sum, chunk, bytes);
    }
    if (walk->summed) {
        sum_end(&sum, digest);
        put(digest, sizeof digest);
    }
}

/* A failure within the content of a transfer can only be reported as a chunk of it. */
static void put_file(struct walk *walk, int fd) {
    struct stat found;
    if (fstat(fd, &found))
        fail(errno);
    if (!S_ISREG(found.st_mode))
        return; /* it was replaced since it was listed */
    put_entry(walk, 'f', &found, NULL, 0);
    if (walk->summed)
        tell_failures(TELL_CHUNK);
    put_content(walk, fd);
    if (walk->summed)
        tell_failures(TELL_RECORD);
}

static void run_tree(struct walk *walk, const char *path) {
    run_walk(walk, path);
    if (walk->file && walk->full)
        fail(TOO_LARGE);
    struct record end = {.kind = 'e', .truncated = walk->full};
    put(&end, sizeof end);
}

void run_list(const char *path, uint64_t depth, uint64_t limit, bool hidden) {
    static struct walk walk;
    walk.depth = depth, walk.entries_left = limit, walk.hidden = hidden;
    run_tree(&walk, path);
}

void run_archive(const char *path, uint64_t max_bytes, uint64_t max_entries) {
    static struct walk walk = {.file = put_file, .hidden = true, .depth = UINT64_MAX};
    walk.bytes_left = max_bytes, walk.entries_left = max_entries;
    run_tree(&walk, path);
}

void run_send(const char *path, uint64_t max_entries) {
    static struct walk walk = {.file = put_file, .summed = true, .hidden = true, .depth = UINT64_MAX,
                               .bytes_left = UINT64_MAX};
    walk.entries_left = max_entries;
    tell_failures(TELL_RECORD);
    be_patient();
    run_tree(&walk, path);
}

/* ---- in ---- */

static void extract_link(const struct place *place, const char *link) {
    if (place->exists && unlinkat(place->directory, place->name, 0))
        fail(errno);
    if (symlinkat(link, place->directory, place->name))
        fail(errno);
}

static void extract_directory(int base, const char *path, const struct record *record) {
    int fd = make_directories(base, path);
    if (fd < 0)
        fail(errno);
    close(fd);
    if (record->kind != 'm')
        return;
    fd = open_beneath(base, path, O_RDONLY | O_DIRECTORY); /* fchmod refuses O_PATH descriptors */
    if (fd < 0 || fchmod(fd, record->mode & 0777))
        fail(errno);
    close(fd);
}

/* Whether a file that is sent becomes the content of the one that exists, with its owner, links and attributes, as cp
 * does. One that may not be written to is replaced by another, as by cp -f; and each one is by what is unpacked, as tar
 * does. */
static bool keeps_file(const struct place *place, bool anew) {
    return place->exists && !anew && !faccessat(place->directory, place->name, W_OK, AT_EACCESS);
}

/* Makes the file of one record of stdin, beneath `base`. A link made by an earlier record may lead to another directory
 * beneath it, but never out of it. `anew`: files that exist are not kept (see keeps_file). */
static void extract_record(int base, const struct record *record, bool anew) {
    static char path[PATH_BYTES], link[PATH_BYTES];
    struct place place;
    if (record->path_bytes >= sizeof path || record->link_bytes >= sizeof link)
        fail(ENAMETOOLONG);
    take(path, record->path_bytes);
    take(link, record->link_bytes);
    path[record->path_bytes] = link[record->link_bytes] = 0;
    if (record->kind == 'd' || record->kind == 'm') {
        extract_directory(base, path, record);
        return;
    }
    find_place(base, path, &place);
    if (place.exists && S_ISDIR(place.found.st_mode))
        fail(EISDIR);
    if (record->kind == 'f')
        place.exists = keeps_file(&place, anew);
    if (record->kind == 'f')
        store(&place, record->mode & 0777, record->size, &record->modified_ns);
    else if (record->kind == 'l')
        extract_link(&place, link);
    else
        fail(USAGE);
    close(place.directory);
}

void run_extract(const char *path) {
    int base = make_directories(root(), from_root(path));
    if (base < 0)
        fail(errno);
    for (;;) {
        struct record record;
        take(&record, sizeof record);
        if (record.kind == 'e')
            break;
        extract_record(base, &record, true);
    }
    struct record end = {.kind = 'e'};
    put(&end, sizeof end);
}

/* The root of the transfer: a file that takes the place of `path`, or the directory that everything else goes into,
 * which is returned (-1 after a file). */
static int take_root(const char *path, const struct record *record) {
    struct place place;
    if (record->path_bytes || record->link_bytes)
        fail(USAGE);
    if (record->kind == 'd') {
        int base = make_directories(root(), path);
        if (base < 0)
            fail(errno);
        return base;
    }
    if (record->kind != 'f' || record->size != CHUNKED)
        fail(USAGE);
    find_target(path, &place);
    if (place.exists && !S_ISREG(place.found.st_mode))
        fail(S_ISDIR(place.found.st_mode) ? EISDIR : NOT_REGULAR);
    place.exists = keeps_file(&place, false);
    store(&place, record->mode & 0777, CHUNKED, &record->modified_ns);
    return -1;
}

void run_receive(const char *path) {
    struct record record;
    be_patient();
    tell_failures(TELL_RECORD);
    blame(path);
    take(&record, sizeof record);
    int base = take_root(from_root(path), &record);
    uint64_t entries = 1;
    for (;; entries++) {
        take(&record, sizeof record);
        if (record.kind == 'e')
            break;
        if (base < 0 || (record.kind == 'f' && record.size != CHUNKED))
            fail(USAGE);
        extract_record(base, &record, false);
    }
    /* Not before: what stopped early must not look complete. */
    struct record end = {.kind = 'e', .size = stored_bytes(), .modified_ns = (int64_t)entries};
    put(&end, sizeof end);
}
