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

/* A file being changed. Once the change is `done`, and was none `over` the old file, the staged name is that of the old
 * content, if any. */
struct change { const struct file *file; struct place place; struct staged staged; bool removes, done; char *path; };
static struct change *changes;
static size_t change_count;

static int write_over(const struct change *change, int mode, const char *content, size_t bytes) {
    return overwrite(&change->place, mode, content, bytes, NULL);
}

static void take_back(void) {
    for (size_t i = change_count; i-- > 0;) {
        struct change *change = &changes[i];
        int directory = change->place.directory;
        const char *name = change->place.name, *staged = change->staged.name;
        if (change->done && change->staged.over) {
            const struct file *file = change->file;
            write_over(change, change->place.found.st_mode & 07777, file->original, file->original_bytes);
        } else if (change->done && change->place.exists) {
            renameat2(directory, staged, directory, name, change->removes ? 0 : RENAME_EXCHANGE);
        } else if (change->done) {
            unlinkat(directory, name, 0);
        }
        if (!(change->done && change->removes))
            drop_staged(&change->staged, directory);
    }
}

_Noreturn static void give_up(const struct change *at, int code) {
    blame(at->path);
    fail(code);
}

static void stage_content(struct change *change) {
    const struct file *file = change->file;
    struct place source, *like = NULL;
    if (file->like && !strcmp(file->like, file->path)) {
        like = &change->place;
    } else if (file->like) {
        find_place(root(), from_root(file->like), &source);
        like = &source;
    }
    int error = open_staged(&change->staged, &change->place, like);
    if (!error)
        error = write_staged(&change->staged, file->mode, file->content, file->bytes);
    if (error)
        give_up(change, error);
    if (like == &source)
        close(source.directory);
}

static void stage_change(const struct file *file) {
    blame(file->path);
    struct change *change = &changes[change_count];
    *change = (struct change){.file = file, .staged.fd = -1, .path = strdup(file->path)};
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
    if (!change->removes)
        stage_content(change);
}

static void give_name(struct change *change) {
    struct staged *staged = &change->staged;
    int error = change->removes || staged->over ? 0 : name_staged(staged, change->place.directory);
    if (error)
        give_up(change, error);
    if (staged->fd >= 0)
        close(staged->fd);
    staged->fd = -1;
}

static int rename_change(struct change *change) {
    int directory = change->place.directory;
    const char *name = change->place.name;
    char *staged = change->staged.name;
    if (!change->removes)
        return renameat2(directory, staged, directory, name,
                         change->place.exists ? RENAME_EXCHANGE : RENAME_NOREPLACE) ? errno : 0;
    if (!change->place.exists)
        return ENOENT;
    random_name(staged);
    if (!renameat2(directory, name, directory, staged, RENAME_NOREPLACE))
        return 0;
    *staged = 0;
    return errno;
}

/* Puts one change in place so that it can be taken back. */
static void carry_out(struct change *change) {
    const struct file *file = change->file;
    struct staged *staged = &change->staged;
    int error = staged->over ? 0 : rename_change(change);
    bool keeps = file->like && !strcmp(file->like, file->path);
    if (error && keeps && !change->removes && change->place.exists && needs_overwrite(error)) {
        drop_staged(staged, change->place.directory);
        staged->over = true;
        error = 0;
    }
    if (error)
        give_up(change, error);
    change->done = true;
    if (staged->over)
        error = write_over(change, file->mode, file->content, file->bytes);
    if (error)
        give_up(change, error);
}

/* As git does: a directory goes with the last file in it that a patch removes. */
static void remove_empty_parents(char *path, const char *base) {
    for (char *slash; (slash = strrchr(path, '/')) && slash != path; ) {
        *slash = 0;
        struct place place;
        if (!strcmp(path, base) || is_root(path))
            return;
        if (faccessat(root(), path, F_OK, AT_SYMLINK_NOFOLLOW))
            return;
        find_place(root(), path, &place);
        int failed = unlinkat(place.directory, place.name, AT_REMOVEDIR);
        close(place.directory);
        if (failed)
            return;
    }
}

static void finish(struct change *change, const char *base) {
    if (change->removes || change->place.exists)
        drop_staged(&change->staged, change->place.directory);
    close(change->place.directory);
    if (change->removes)
        remove_empty_parents(change->path, base);
    free(change->path);
}

void put_in_place(const struct file *files, const size_t *order, size_t count, const char *base) {
    changes = calloc(count + 1, sizeof *changes);
    if (!changes)
        fail(ENOMEM);
    undo_with(take_back);
    for (size_t i = 0; i < count; i++)
        if (files[order[i]].exists || files[order[i]].existed) /* not what was both made and removed again */
            stage_change(&files[order[i]]);
    for (size_t i = 0; i < change_count; i++)
        give_name(&changes[i]);
    for (size_t i = 0; i < change_count; i++)
        carry_out(&changes[i]);
    undo_with(NULL);
    for (size_t i = 0; i < change_count; i++)
        finish(&changes[i], base);
}
