/* What a diff makes of the files it names. See patch.h. */
#define _GNU_SOURCE
#include "patch.h"

#include "changes.h"
#include "diff.h"
#include "hunks.h"
#include "io.h"
#include "paths.h"
#include "store.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_TOTAL = 64 << 20, SHOWN_PATH = 500 };

/* What is printed about a part. */
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
    into->original = into->content = content.bytes;
    into->original_bytes = into->bytes = content.count;
}

static void read_file(struct file *into) {
    struct stat found;
    blame(into->path);
    int fd = open_beneath(root(), from_root(into->path), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
        return;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (!S_ISREG(found.st_mode))
        fail(S_ISDIR(found.st_mode) ? EISDIR : NOT_REGULAR);
    into->existed = into->exists = true;
    into->original_mode = found.st_mode & 0777;
    into->like = into->path;
    read_content(into, fd, (uint64_t)found.st_size);
    close(fd);
}

/* Where in `files` the file of that name is, as the parts before have left it. */
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
    files[file_count] = (struct file){.path = path, .mode = KEPT_MODE};
    read_file(&files[file_count]);
    return file_count++;
}

/* ---- what the diff makes of them ---- */

static void change(size_t index) {
    if (!files[index].changes)
        order[order_count++] = index;
    files[index].changes = true;
}

static void set_content(struct file *file, char *content, size_t bytes) {
    if (file->content != file->original)
        free(file->content);
    file->content = content, file->bytes = bytes;
    file->exists = content != NULL;
}

static void remove_file(size_t index) {
    set_content(&files[index], NULL, 0);
    files[index].made = false;
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

static struct fit fitted(const struct patch *patch, const struct part *part, const struct file *before, size_t fuzz) {
    struct fit fit;
    struct text why = {0};
    if (!apply_hunks(patch, part, before->content ? before->content : "", before->bytes, fuzz, &fit, &why)) {
        add(&why, "", 1);
        misfit(before->path, why.bytes);
    }
    if (!fit.bytes && !(fit.bytes = malloc(1)))
        fail(ENOMEM);
    return fit;
}

static char action_of(const struct part *part) {
    return part->creates ? 'c' : part->deletes ? 'd' : part->renames ? 'r' : part->copies ? 'y' : 'm';
}

/* Whether another part renames the file of that name, so that the name is free. */
static bool is_vacated(const struct patch *patch, const char *name) {
    for (size_t i = 0; i < patch->part_count; i++)
        if (patch->parts[i].renames && patch->parts[i].old && !strcmp(patch->parts[i].old, name))
            return true;
    return false;
}

/* Whether the part begins with the file as it was before the whole patch. git writes copies and renames so, of files
 * that the same diff changes (copies) or replaces (renames, as in a swap). Other parts go on from what the parts before
 * them did, as in a series of diffs. */
static bool begins_anew(const struct part *part, const struct file *source) {
    bool changed = source->changes && source->exists && !source->made;
    return source->existed && (part->copies || (part->renames && !changed));
}

/* The file that the part begins with. */
static struct file before_of(const struct part *part, const struct file *source, const struct file *path, bool anew) {
    struct file before = *source;
    if (part->creates)
        before = (struct file){.path = source->path, .like = path->existed ? path->path : NULL,
                               .mode = path->existed ? KEPT_MODE : 0644};
    if (anew) {
        before.content = source->original, before.bytes = source->original_bytes;
        before.exists = true, before.mode = KEPT_MODE, before.like = source->path;
    }
    if (part->copies) {
        before.mode = before.mode == KEPT_MODE ? (int)source->original_mode : before.mode;
        before.like = NULL;
    }
    return before;
}

static void check_names(const struct patch *patch, const struct part *part, const struct file *before, size_t at,
                        size_t from) {
    const struct file *path = &files[at], *source = &files[from];
    if (part->creates && source->exists && source->bytes)
        misfit(path->path, "the patch creates it as a new file, but it already exists; "
                           "make a diff against the existing file");
    if (!part->creates && !before->exists)
        misfit(source->path, "there is no such file");
    bool taken = path->exists && at != from && (path->made || !is_vacated(patch, part->new));
    if ((part->renames || part->copies) && taken)
        misfit(path->path, "the new name is taken: a file of that name already exists");
}

static struct told take_part(const struct patch *patch, const struct part *part, size_t fuzz) {
    size_t at = file_of(part->new ? part->new : part->old), from = part->old ? file_of(part->old) : at;
    struct file *path = &files[at], *source = &files[from];
    bool anew = begins_anew(part, source), vacates = part->renames && at != from && !(anew && source->made);
    struct file before = before_of(part, source, path, anew);
    check_names(patch, part, &before, at, from);
    struct fit fit = fitted(patch, part, &before, fuzz);
    struct told said = {.path = at, .source = from, .action = action_of(part), .hunks = part->hunks, .fuzz = fit.fuzz,
                        .offset_lines = fit.offset_lines};
    if (part->deletes) {
        check_whole(path, &fit);
        free(fit.bytes);
        remove_file(at);
        return said;
    }
    set_content(path, fit.bytes, fit.count);
    path->mode = part->mode < 0 ? before.mode : part->mode, path->like = before.like;
    path->made |= part->creates || part->copies || part->renames;
    change(at);
    if (vacates)
        remove_file(from);
    return said;
}

/* ---- all of it ---- */

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

static void take_text(struct patch *patch, uint64_t bytes) {
    if (bytes >= MAX_PATCH_BYTES)
        fail(TOO_LARGE);
    char *text = malloc(bytes + 1);
    if (!text)
        fail(ENOMEM);
    take(text, bytes);
    patch->text = text, patch->bytes = bytes;
}

/* `path` as the beginning of names below it: without slashes at its end, and empty for the workspace itself. */
static void set_base(const char *path) {
    char *copy = strdup(path);
    if (!copy)
        fail(ENOMEM);
    for (size_t count = strlen(copy); count > 1 && copy[count - 1] == '/';)
        copy[--count] = 0;
    if (!strcmp(copy, ".") || is_root(copy))
        *copy = 0;
    base = copy;
}

void run_patch(const char *path, const char *strip, uint64_t fuzz, uint64_t bytes) {
    static struct patch patch;
    take_text(&patch, bytes);
    parse_patch(&patch, strcmp(strip, "-") ? (int)(number(strip) & 0xff) : NO_STRIP);
    tell_failures(TELL_RECORD);
    set_base(path);
    files = calloc(2 * patch.part_count, sizeof *files);
    order = calloc(2 * patch.part_count, sizeof *order);
    told = calloc(patch.part_count, sizeof *told);
    if (!files || !order || !told)
        fail(ENOMEM);
    for (size_t i = 0; i < patch.part_count; i++)
        told[i] = take_part(&patch, &patch.parts[i], fuzz > MAX_FUZZ ? MAX_FUZZ : (size_t)fuzz);
    put_in_place(files, order, order_count, base);
    for (size_t i = 0; i < patch.part_count; i++)
        put_told(&told[i]);
    struct record end = {.kind = 'e'};
    put(&end, sizeof end);
}
