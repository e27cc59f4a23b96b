/* Whole trees in (extract, receive). See slotfiles.h. */
#define _GNU_SOURCE
#include "slotfiles.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void extract_link(const struct place *place, const char *link) {
    if (place->exists && unlinkat(place->directory, place->name, 0))
        fail(errno);
    if (symlinkat(link, place->directory, place->name))
        fail(errno);
}

/* One record of stdin beneath `base`. A link made by an earlier record may lead to another directory
 * beneath it, never out of it. */
static void extract_record(int base, const struct record *record) {
    static char path[PATH_BYTES], link[PATH_BYTES];
    struct place place;
    if (record->path_bytes >= sizeof path || record->link_bytes >= sizeof link)
        fail(ENAMETOOLONG);
    take(path, record->path_bytes);
    take(link, record->link_bytes);
    path[record->path_bytes] = link[record->link_bytes] = 0;
    if (record->kind == 'd' || record->kind == 'm') {
        int fd = make_directories(base, path);
        if (fd < 0)
            fail(errno);
        close(fd);
        if (record->kind == 'm') { /* fchmod refuses O_PATH descriptors */
            fd = open_beneath(base, path, O_RDONLY | O_DIRECTORY);
            if (fd < 0 || fchmod(fd, record->mode & 0777))
                fail(errno);
            close(fd);
        }
        return;
    }
    find_place(base, path, &place);
    if (place.exists && S_ISDIR(place.found.st_mode))
        fail(EISDIR);
    if (record->kind == 'f')
        store(&place, record->mode & 0777, record->size, &record->modified_ns);
    else if (record->kind == 'l')
        extract_link(&place, link);
    else
        fail(USAGE);
    close(place.directory);
}

void run_extract(const char *path) {
    int base = make_directories(root, below_root(path));
    if (base < 0)
        fail(errno);
    for (;;) {
        struct record record;
        take(&record, sizeof record);
        if (record.kind == 'e')
            break;
        extract_record(base, &record);
    }
    struct record end = {.kind = 'e'};
    put(&end, sizeof end);
}

/* The root of the transfer: a file that takes PATH's place, or the directory that everything else goes into. */
static int take_root(const char *path, const struct record *record) {
    struct place place;
    if (record->path_bytes || record->link_bytes)
        fail(USAGE);
    if (record->kind == 'd') {
        int base = make_directories(root, path);
        if (base < 0)
            fail(errno);
        return base;
    }
    if (record->kind != 'f' || record->size != CHUNKED)
        fail(USAGE);
    find_target(path, &place);
    if (place.exists && !S_ISREG(place.found.st_mode))
        fail(S_ISDIR(place.found.st_mode) ? EISDIR : NOT_REGULAR);
    store(&place, record->mode & 0777, CHUNKED, &record->modified_ns);
    return -1;
}

void run_receive(const char *path) {
    struct record record;
    be_patient();
    telling = TELL_RECORD;
    snprintf(failing_path, sizeof failing_path, "%s", path);
    take(&record, sizeof record);
    int base = take_root(below_root(path), &record);
    uint64_t entries = 1;
    for (;; entries++) {
        take(&record, sizeof record);
        if (record.kind == 'e')
            break;
        if (base < 0 || (record.kind == 'f' && record.size != CHUNKED))
            fail(USAGE);
        extract_record(base, &record);
    }
    /* Only now: whatever stopped early must not look complete. */
    struct record end = {.kind = 'e', .size = stored_bytes, .modified_ns = (int64_t)entries};
    put(&end, sizeof end);
}
