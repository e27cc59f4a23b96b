/* What a diff makes of the files it names. See patch.h. */
#define _GNU_SOURCE
#include "patch.h"

#include "changes.h"
#include "diff.h"
#include "hunks.h"
#include "io.h"
#include "paths.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_TOTAL = 64 << 20, SHOWN_PATH = 500 };

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
    blame(into->path);
    int fd = open_beneath(root(), from_root(into->path), O_RDONLY | O_NONBLOCK | O_NOCTTY);
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
        misfit(path->path, "the patch creates it as a new file, but it already exists; "
                           "make a diff against the existing file");
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
    put_in_place(files, order, order_count);
    for (size_t i = 0; i < patch.part_count; i++)
        put_told(&told[i]);
    struct record end = {.kind = 'e'};
    put(&end, sizeof end);
}
