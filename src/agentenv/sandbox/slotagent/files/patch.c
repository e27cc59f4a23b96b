/* patch: what a unified diff makes of the files it names, put in place all at once. See slotpatch.h.
 *
 * It prints a record for each part of the diff (path, link: the old path; mode: what was done, a letter), each
 * followed by three u64: hunks, fuzz, offset in lines; then `e`. When the text is no diff, or does not fit the
 * files, it prints the record 'w' (size: bytes) and why, and nothing was changed.
 */
#define _GNU_SOURCE
#include "slotpatch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_TOTAL = 64 << 20, SHOWN_PATH = 500 };

/* A file that the diff names: as it was (`existed`), and as it is to be. */
struct file {
    char *path;
    bool existed, exists, changes;
    mode_t mode;
    char *content;
    size_t bytes;
};

/* What is told of a part. */
struct told { size_t path, source; char action; uint64_t hunks, fuzz, offset_lines; };

static struct file *files;
static struct told *told;
static size_t *order; /* of the changes */
static size_t file_count, order_count;
static uint64_t total;
static const char *base; /* that names are relative to; empty: the workspace */

_Noreturn static void misfit(const char *path, const char *why) {
    struct text text = {0};
    add_shown(&text, path, strlen(path), SHOWN_PATH);
    addf(&text, ": %s\nNothing was changed.\n", why);
    explain(DOES_NOT_FIT, &text);
}

/* ---- the files as they are ---- */

static void read_content(struct file *into, int fd, uint64_t size) {
    struct text content = {0};
    char chunk[CHUNK];
    if (size > MAX_TOTAL - total)
        fail(TOO_LARGE);
    for (ssize_t got; (got = read(fd, chunk, sizeof chunk));) {
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            fail(errno);
        if ((uint64_t)got > MAX_TOTAL - total)
            fail(TOO_LARGE);
        total += (uint64_t)got;
        add(&content, chunk, (size_t)got);
    }
    into->content = content.bytes, into->bytes = content.count;
}

static void read_file(struct file *into) {
    struct stat found;
    snprintf(failing_path, sizeof failing_path, "%s", into->path);
    int fd = open_beneath(root, below_root(into->path), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
        return;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (!S_ISREG(found.st_mode))
        fail(S_ISDIR(found.st_mode) ? EISDIR : NOT_REGULAR);
    into->existed = into->exists = true;
    into->mode = found.st_mode & 0777;
    read_content(into, fd, (uint64_t)found.st_size);
    close(fd);
}

/* The file of that name in the diff, as the parts before left it; its place in `files`. */
static size_t file_of(const char *name) {
    if (!name[strspn(name, "/")])
        misfit("patch", "a file name is empty");
    bool joined = *base && *name != '/';
    char *path;
    if (asprintf(&path, "%s%s%s", joined ? base : "", joined ? "/" : "", name) < 0)
        fail(ENOMEM);
    if (strlen(path) >= PATH_BYTES)
        fail(ENAMETOOLONG);
    for (size_t i = 0; i < file_count; i++) {
        if (!strcmp(files[i].path, path)) {
            free(path);
            return i;
        }
    }
    files[file_count] = (struct file){.path = path};
    read_file(&files[file_count]);
    return file_count++;
}

/* ---- what the diff makes of them ---- */

static void change(size_t index) {
    if (!files[index].changes)
        order[order_count++] = index;
    files[index].changes = true;
}

static void remove_file(size_t index) {
    struct file *file = &files[index];
    free(file->content);
    file->content = NULL, file->bytes = 0;
    file->exists = false;
    change(index);
}

static void check_whole(const struct file *file, const struct fit *fit) {
    if (!fit->count)
        return;
    size_t left = fit->bytes[fit->count - 1] != '\n';
    for (size_t i = 0; i < fit->count; i++)
        left += fit->bytes[i] == '\n';
    char *why;
    if (asprintf(&why, "the patch deletes it, but does not remove %zu of its lines", left) < 0)
        fail(ENOMEM);
    misfit(file->path, why);
}

static struct fit fitted(const struct patch *patch, const struct part *part, const struct file *source, size_t fuzz) {
    struct fit fit;
    struct text why = {0};
    if (!apply_hunks(patch, part, source->content ? source->content : "", source->bytes, fuzz, &fit, &why)) {
        add(&why, "", 1);
        misfit(source->path, why.bytes);
    }
    return fit;
}

static char action_of(const struct part *part) {
    return part->creates ? 'c' : part->deletes ? 'd' : part->renames ? 'r' : part->copies ? 'y' : 'm';
}

/* One part, on top of what the parts before it did. */
static struct told take_part(const struct patch *patch, const struct part *part, size_t fuzz) {
    size_t at = file_of(part->new ? part->new : part->old), from = part->old ? file_of(part->old) : at;
    struct file *path = &files[at], *source = &files[from];
    static struct file nothing;
    nothing = (struct file){.path = source->path, .mode = 0644};
    if (part->creates && source->exists && source->bytes)
        misfit(path->path, "the patch creates it as a new file, but it already exists; make a diff against the existing file");
    if (!part->creates && !source->exists)
        misfit(source->path, "there is no such file");
    if ((part->renames || part->copies) && path->exists && at != from)
        misfit(path->path, "the new name is taken: a file of that name already exists");
    struct file *before = part->creates ? &nothing : source;
    struct fit fit = fitted(patch, part, before, fuzz);
    mode_t mode = part->mode < 0 ? before->mode : (mode_t)part->mode;
    struct told said = {.path = at, .source = from, .action = action_of(part), .hunks = part->hunks, .fuzz = fit.fuzz,
                        .offset_lines = fit.offset_lines};
    if (part->deletes) {
        check_whole(path, &fit);
        free(fit.bytes);
        remove_file(at);
        return said;
    }
    free(path->content);
    path->content = fit.bytes, path->bytes = fit.count;
    path->exists = true, path->mode = mode;
    change(at);
    if (part->renames && at != from)
        remove_file(from);
    return said;
}

/* ---- putting it in place ---- */

/* A file being changed. `staged` holds its new content; once `done`, its old one (if it had one). */
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

static void stage_change(const struct file *file) {
    snprintf(failing_path, sizeof failing_path, "%s", file->path);
    struct change *change = &changes[change_count];
    change->path = strdup(file->path);
    if (!change->path)
        fail(ENOMEM);
    find_place(root, below_root(file->path), &change->place);
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

static void put_told(const struct told *part) {
    const char *path = files[part->path].path;
    const char *old = part->action == 'r' || part->action == 'y' ? files[part->source].path : "";
    struct record record = {.kind = 'p', .mode = (uint16_t)part->action, .path_bytes = (uint32_t)strlen(path),
                            .link_bytes = (uint32_t)strlen(old)};
    put(&record, sizeof record);
    put(path, record.path_bytes);
    put(old, record.link_bytes);
    put((uint64_t[3]){part->hunks, part->fuzz, part->offset_lines}, 3 * sizeof(uint64_t));
}

static void put_in_place(void) {
    undo = take_back;
    for (size_t i = 0; i < order_count; i++)
        if (files[order[i]].exists || files[order[i]].existed) /* not what the same patch made and removed */
            stage_change(&files[order[i]]);
    for (size_t i = 0; i < change_count; i++)
        name_staged(&changes[i]);
    for (size_t i = 0; i < change_count; i++)
        carry_out(&changes[i]);
    undo = NULL;
    for (size_t i = 0; i < change_count; i++)
        finish(&changes[i]);
}

static void take_text(struct patch *patch, uint64_t bytes) {
    if (bytes >= MAX_PATCH_BYTES)
        fail(TOO_LARGE);
    char *text = malloc(bytes + 1);
    if (!text)
        fail(ENOMEM);
    take(text, bytes);
    patch->text = text, patch->bytes = bytes;
}

/* `path` as names below it begin: without a slash at its end, and empty for the workspace itself. */
static void set_base(const char *path) {
    char *copy = strdup(path);
    if (!copy)
        fail(ENOMEM);
    for (size_t count = strlen(copy); count && copy[count - 1] == '/';)
        copy[--count] = 0;
    if (!strcmp(copy, ".") || !strcmp(copy, root_name))
        *copy = 0;
    base = copy;
}

void run_patch(const char *path, const char *strip, uint64_t fuzz, uint64_t bytes) {
    static struct patch patch;
    take_text(&patch, bytes);
    parse_patch(&patch, strcmp(strip, "-") ? (int)(number(strip) & 0xff) : NO_STRIP);
    telling = TELL_RECORD;
    set_base(path);
    files = calloc(2 * patch.part_count, sizeof *files);
    order = calloc(2 * patch.part_count, sizeof *order);
    told = calloc(patch.part_count, sizeof *told);
    changes = calloc(2 * patch.part_count, sizeof *changes);
    if (!files || !order || !told || !changes)
        fail(ENOMEM);
    for (size_t i = 0; i < patch.part_count; i++)
        told[i] = take_part(&patch, &patch.parts[i], fuzz > MAX_FUZZ ? MAX_FUZZ : (size_t)fuzz);
    put_in_place();
    for (size_t i = 0; i < patch.part_count; i++)
        put_told(&told[i]);
    struct record end = {.kind = 'e'};
    put(&end, sizeof end);
}
