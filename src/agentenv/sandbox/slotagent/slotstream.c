/* Whole trees in (extract, receive), and changes to several files at once (apply). See slotfiles.h. */
#define _GNU_SOURCE
#include "slotfiles.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
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

static void take_path(const struct record *record, char path[PATH_BYTES]) {
    if (record->path_bytes >= PATH_BYTES || record->link_bytes)
        fail(USAGE);
    take(path, record->path_bytes);
    path[record->path_bytes] = 0;
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

/* ---- apply ---- */

enum { MAX_CHANGES = 2000 };

/* One file that is to change. `staged` holds its new content; once `done`, its old one (if it had one). */
struct change { struct place place; char staged[32]; int fd; bool removes, done; char *path; };
static struct change *changes;
static size_t change_count;

static void take_back(void) {
    undo = NULL;
    for (size_t i = change_count; i-- > 0;) {
        struct change *change = &changes[i];
        int directory = change->place.directory;
        if (change->done && change->place.exists) {
            if (change->removes)
                renameat(directory, change->staged, directory, change->place.name);
            else
                renameat2(directory, change->staged, directory, change->place.name, RENAME_EXCHANGE);
        } else if (change->done) {
            unlinkat(directory, change->place.name, 0);
        }
        if (*change->staged && !(change->done && change->removes))
            unlinkat(directory, change->staged, 0);
    }
}

static void give_up(const struct change *at, int code) {
    snprintf(failing_path, sizeof failing_path, "%s", at->path);
    fail(code);
}

static void stage_change(const struct record *record) {
    static char path[PATH_BYTES];
    take_path(record, path);
    if (change_count == MAX_CHANGES || (record->kind != 'f' && record->kind != 'u'))
        fail(USAGE);
    snprintf(failing_path, sizeof failing_path, "%s", path);
    struct change *change = &changes[change_count];
    change->path = strdup(path);
    if (!change->path)
        fail(ENOMEM);
    find_place(root, below_root(path), &change->place);
    change_count++;
    const struct place *place = &change->place;
    if (place->exists && !S_ISREG(place->found.st_mode))
        give_up(change, S_ISDIR(place->found.st_mode) ? EISDIR : NOT_REGULAR);
    if (place->exists && faccessat(place->directory, place->name, W_OK, AT_EACCESS))
        give_up(change, errno);
    change->removes = record->kind == 'u';
    if (change->removes)
        return;
    int error = stage(place, record->mode & 0777, record->size, change->staged, &change->fd);
    if (error)
        give_up(change, error);
}

static void name_staged(struct change *change) {
    if (change->removes || *change->staged)
        return;
    random_name(change->staged);
    int error = give_name(change->fd, change->place.directory, change->staged);
    if (error) {
        *change->staged = 0;
        give_up(change, error);
    }
    close(change->fd);
}

/* Puts one change in place so that it can be taken back. */
static void carry_out(struct change *change) {
    int directory = change->place.directory, failed;
    const char *name = change->place.name;
    if (change->removes) {
        if (!change->place.exists)
            give_up(change, ENOENT);
        random_name(change->staged);
        failed = renameat2(directory, name, directory, change->staged, RENAME_NOREPLACE);
        if (failed)
            *change->staged = 0;
    } else {
        failed = renameat2(directory, change->staged, directory, name,
                           change->place.exists ? RENAME_EXCHANGE : RENAME_NOREPLACE);
    }
    if (failed)
        give_up(change, errno);
    change->done = true;
}

/* As git does: a directory whose last file a patch removed goes too. */
static void remove_empty_parents(char *path) {
    for (char *slash; (slash = strrchr(path, '/')) && slash != path; ) {
        *slash = 0;
        struct place place;
        if (faccessat(root, path, F_OK, AT_SYMLINK_NOFOLLOW))
            return;
        find_place(root, path, &place);
        int failed = unlinkat(place.directory, place.name, AT_REMOVEDIR);
        close(place.directory);
        if (failed)
            return;
    }
}

static void finish(struct change *change) {
    if (change->removes || change->place.exists)
        unlinkat(change->place.directory, change->staged, 0);
    close(change->place.directory);
    if (change->removes)
        remove_empty_parents(change->path);
    free(change->path);
}

void run_apply(void) {
    telling = TELL_RECORD;
    changes = calloc(MAX_CHANGES, sizeof *changes);
    if (!changes)
        fail(ENOMEM);
    undo = take_back;
    for (;;) {
        struct record record;
        take(&record, sizeof record);
        if (record.kind == 'e')
            break;
        stage_change(&record);
    }
    for (size_t i = 0; i < change_count; i++)
        name_staged(&changes[i]);
    for (size_t i = 0; i < change_count; i++)
        carry_out(&changes[i]);
    undo = NULL;
    for (size_t i = 0; i < change_count; i++)
        finish(&changes[i]);
    free(changes);
    struct record end = {.kind = 'e', .modified_ns = (int64_t)change_count};
    put(&end, sizeof end);
}
