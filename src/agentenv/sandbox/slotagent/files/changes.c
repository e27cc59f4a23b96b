/* Staging, renaming and taking back. See changes.h. */
#define _GNU_SOURCE
#include "changes.h"

#include "io.h"
#include "paths.h"
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A file being changed. `staged` is the name of its new content; once the change is `done`, of the old one, if any. */
struct change { struct place place; char staged[32]; int fd; bool removes, done; char *path; };
static struct change *changes;
static size_t change_count;

static void take_back(void) {
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

_Noreturn static void give_up(const struct change *at, int code) {
    blame(at->path);
    fail(code);
}

static void stage_change(const struct file *file) {
    blame(file->path);
    struct change *change = &changes[change_count];
    change->path = strdup(file->path);
    if (!change->path)
        fail(ENOMEM);
    find_place(root(), from_root(file->path), &change->place);
    change_count++;
    const struct place *place = &change->place;
    if (place->exists && !S_ISREG(place->found.st_mode))
        give_up(change, S_ISDIR(place->found.st_mode) ? EISDIR : NOT_REGULAR);
    if (place->exists && faccessat(place->directory, place->name, W_OK, AT_EACCESS))
        give_up(change, errno);
    change->removes = !file->exists;
    if (change->removes)
        return;
    int error = stage(place, file->mode, file->content, file->bytes, change->staged, &change->fd);
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

/* As git does: a directory goes with the last file in it that a patch removes. */
static void remove_empty_parents(char *path) {
    for (char *slash; (slash = strrchr(path, '/')) && slash != path; ) {
        *slash = 0;
        struct place place;
        if (faccessat(root(), path, F_OK, AT_SYMLINK_NOFOLLOW))
            return;
        find_place(root(), path, &place);
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

void put_in_place(const struct file *files, const size_t *order, size_t count) {
    changes = calloc(count + 1, sizeof *changes);
    if (!changes)
        fail(ENOMEM);
    undo_with(take_back);
    for (size_t i = 0; i < count; i++)
        if (files[order[i]].exists || files[order[i]].existed) /* not what was both made and removed again */
            stage_change(&files[order[i]]);
    for (size_t i = 0; i < change_count; i++)
        name_staged(&changes[i]);
    for (size_t i = 0; i < change_count; i++)
        carry_out(&changes[i]);
    undo_with(NULL);
    for (size_t i = 0; i < change_count; i++)
        finish(&changes[i]);
}
