/* Walking a tree. See walk.h. */
#define _GNU_SOURCE
#include "walk.h"

#include "paths.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DEPTH = 512 };

void put_entry(const struct walk *walk, char kind, const struct stat *found, const char *link, size_t link_bytes) {
    struct record record = {
        .kind = (uint8_t)kind,
        .mode = found->st_mode & 07777,
        .path_bytes = (uint32_t)strlen(walk->path),
        .link_bytes = (uint32_t)link_bytes,
        .size = (uint64_t)found->st_size,
        .modified_ns = found->st_mtim.tv_sec * 1000000000 + found->st_mtim.tv_nsec,
    };
    put(&record, sizeof record);
    put(walk->path, record.path_bytes);
    put(link, link_bytes);
}

static void visit_file(struct walk *walk, int directory, const char *name) {
    int fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0) {
        walk->file(walk, fd);
        close(fd);
    } else if (errno != ENOENT) {
        fail(errno);
    }
}

static void walk_directory(struct walk *walk, int fd, uint64_t depth);

static void visit(struct walk *walk, int directory, const char *name, uint64_t depth) {
    struct stat found;
    char link[PATH_BYTES / 2];
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW))
        return; /* removed since it was listed */
    char kind = S_ISREG(found.st_mode) ? 'f' : S_ISDIR(found.st_mode) ? 'd' : S_ISLNK(found.st_mode) ? 'l' : 'o';
    if (walk->file && kind == 'o')
        return;
    if (!walk->entries_left) {
        walk->full = true;
        return;
    }
    walk->entries_left--;
    if (walk->file)
        blame(walk->path);
    if (walk->file && kind == 'f') {
        visit_file(walk, directory, name);
        return;
    }
    ssize_t link_bytes = kind == 'l' ? readlinkat(directory, name, link, sizeof link) : 0;
    put_entry(walk, kind, &found, link, link_bytes > 0 ? (size_t)link_bytes : 0);
    if (kind != 'd' || depth >= walk->depth)
        return;
    if (depth >= MAX_DEPTH)
        fail(ENAMETOOLONG);
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0)
        walk_directory(walk, fd, depth + 1);
    else if (walk->file && errno != ENOENT)
        fail(errno); /* an archive must not silently miss a part; a listing shows the entry */
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names of a directory, sorted; the caller frees them. Takes over `fd`. */
static char **sorted_names(int fd, bool hidden, size_t *count, DIR **stream) {
    size_t room = 0;
    char **names = NULL;
    *stream = fdopendir(fd);
    if (!*stream)
        fail(errno);
    *count = 0;
    for (struct dirent *entry; (entry = readdir(*stream));) {
        const char *name = entry->d_name;
        if (!strcmp(name, ".") || !strcmp(name, "..") || (!hidden && *name == '.'))
            continue;
        if (*count == room && !(names = realloc(names, (room = room * 2 + 64) * sizeof *names)))
            fail(ENOMEM);
        if (!(names[(*count)++] = strdup(name)))
            fail(ENOMEM);
    }
    if (*count)
        qsort(names, *count, sizeof *names, compare_names);
    return names;
}

static void walk_directory(struct walk *walk, int fd, uint64_t depth) {
    size_t count, length = strlen(walk->path);
    DIR *stream;
    char **names = sorted_names(fd, walk->hidden, &count, &stream);
    for (size_t i = 0; i < count; i++) {
        if (length + strlen(names[i]) + 2 > sizeof walk->path)
            fail(ENAMETOOLONG);
        if (!walk->full) {
            snprintf(walk->path + length, sizeof walk->path - length, "%s%s", length ? "/" : "", names[i]);
            visit(walk, dirfd(stream), names[i], depth);
            walk->path[length] = 0;
        }
        free(names[i]);
    }
    free(names);
    closedir(stream);
}

void run_walk(struct walk *walk, const char *path) {
    path = from_root(path);
    int fd = open_beneath(root(), path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    struct stat found;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (S_ISDIR(found.st_mode)) {
        if (walk->summed)
            put_entry(walk, 'd', &found, NULL, 0);
        walk_directory(walk, fd, 1);
        return;
    }
    if (!walk->file)
        fail(ENOTDIR);
    if (!S_ISREG(found.st_mode))
        fail(NOT_REGULAR);
    const char *slash = strrchr(path, '/');
    if (!walk->summed) /* an archive names it; those who send it know its name */
        snprintf(walk->path, sizeof walk->path, "%s", slash ? slash + 1 : path);
    walk->file(walk, fd);
    close(fd);
}
