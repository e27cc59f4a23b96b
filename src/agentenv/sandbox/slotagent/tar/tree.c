/* See tree.h. */
#define _GNU_SOURCE
#include "tree.h"

#include "layer.h"
#include "links.h"
#include "steps.h"
#include "write.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { PATH_BYTES = PATH_MAX, VALUE_BYTES = 64 * 1024, CHUNK = 128 * 1024 };

static enum purpose purpose;
static dev_t file_system; /* of the directory with which a tar of FILES begins */

/* Adds the attributes of what `at` (/proc/self/fd/N/NAME) names to the next entry's records; whether it is opaque. */
static bool add_attributes(const char *at) {
    static char names[VALUE_BYTES], value[VALUE_BYTES];
    bool opaque = false;
    ssize_t bytes = llistxattr(at, names, sizeof names);
    if (bytes < 0 && errno != ENOTSUP)
        fail("list the attributes of", at);
    for (const char *name = names; bytes > 0 && name < names + bytes; name += strlen(name) + 1) {
        char key[XATTR_NAME_MAX + 16];
        ssize_t size = lgetxattr(at, name, value, sizeof value);
        if (size < 0 && errno == ENODATA)
            continue;
        if (size < 0)
            fail("read an attribute of", at);
        if (purpose != WHOLE && !strncmp(name, "user.overlay.", 13)) {
            opaque |= !strcmp(name + 13, "opaque") && size == 1 && *value == 'y';
            continue;
        }
        snprintf(key, sizeof key, "SCHILY.xattr.%.*s", XATTR_NAME_MAX, name);
        add_record(key, value, (size_t)size);
    }
    return opaque;
}

/* Reading for a tree that must be as it was leaves no trace either. */
static int open_flags(void) {
    return O_RDONLY | O_NOFOLLOW | O_CLOEXEC | (purpose == WHOLE ? O_NOATIME : 0);
}

static void copy_content(int fd, const char *path, off_t from, off_t bytes) {
    static char chunk[CHUNK];
    while (bytes > 0) {
        ssize_t got = pread(fd, chunk, bytes < CHUNK ? (size_t)bytes : CHUNK, from);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            fail("read", path);
        write_content(chunk, (size_t)got);
        from += got, bytes -= got;
    }
}

/* The parts of a file that are not holes; the last one, of no bytes, is at its end. NULL: it has no holes. */
static struct extent *extents_of(int fd, const char *path, off_t size, size_t *count) {
    size_t room = 16, used = 0;
    struct extent *found = malloc(room * sizeof *found);
    for (off_t from = 0; found; used++) {
        off_t data = from < size ? lseek(fd, from, SEEK_DATA) : size;
        if (data < 0 && errno != ENXIO)
            fail("look for holes in", path);
        if (data < 0 || data > size)
            data = size;
        off_t end = data < size ? lseek(fd, data, SEEK_HOLE) : size;
        if (end < 0)
            fail("look for holes in", path);
        if (used == room)
            found = realloc(found, (room *= 2) * sizeof *found);
        if (!found)
            break;
        found[used] = (struct extent){data, (end < size ? end : size) - data};
        from = data + found[used].bytes;
        if (data == size)
            break;
    }
    if (!found)
        fail("allocate", "holes");
    *count = used + 1;
    if ((used == 1 && found->bytes == size) || !size) {
        free(found);
        return NULL;
    }
    return found;
}

static void write_file(int directory, const char *name, const char *path, const struct stat *found) {
    int fd = openat(directory, name, open_flags());
    if (fd < 0)
        fail("open", path);
    size_t count = 0;
    struct extent *extents = purpose == WHOLE ? extents_of(fd, path, found->st_size, &count) : NULL;
    if (extents) {
        write_sparse_header(path, found, extents, count);
        for (size_t i = 0; i < count; i++)
            copy_content(fd, path, extents[i].from, extents[i].bytes);
        free(extents);
    } else {
        write_header(path, '0', found, "");
        copy_content(fd, path, 0, found->st_size);
    }
    end_content();
    close(fd);
}

static void write_marker(const char *path, size_t parent, const char *prefix, const char *name) {
    static const struct stat empty = {.st_mode = S_IFREG | 0600};
    char marker[PATH_BYTES];
    if (parent + strlen(prefix) + strlen(name) + 1 > sizeof marker) {
        errno = ENAMETOOLONG;
        fail("name", path);
    }
    memcpy(marker, path, parent);
    strcpy(marker + parent, prefix);
    strcat(marker, name);
    begin_records();
    write_header(marker, '0', &empty, "");
}

static void begin_entry(const struct stat *found) {
    begin_records();
    if (purpose == WHOLE)
        add_time("atime", &found->st_atim);
}

static void write_tree(int directory, char *path, size_t length);

static void write_directory(int parent, const char *name, char *path, size_t length, const struct stat *found,
                            bool opaque) {
    path[length] = '/';
    path[length + 1] = 0;
    write_header(path, '5', found, "");
    if (opaque && purpose == LAYER)
        write_marker(path, length + 1, ".wh..wh..opq", "");
    path[length] = 0;
    if (purpose == FILES && found->st_dev != file_system)
        return;
    path[length] = '/';
    int fd = openat(parent, name, O_DIRECTORY | open_flags());
    if (fd < 0)
        fail("open", path);
    write_tree(fd, path, length + 1);
    path[length] = 0;
}

/* `path` names it relative to the layer; `parent` bytes of that are its directory's. */
static void write_entry(int directory, const char *name, char *path, size_t parent) {
    struct stat found;
    static char link[PATH_BYTES]; /* not on the stack: this calls itself for every directory on the way down */
    char at[320];
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) < 0)
        fail("look at", path);
    if (S_ISSOCK(found.st_mode) || (purpose == LAYER && is_reserved(name)))
        return;
    if (purpose == LAYER && is_mark(&found)) {
        write_marker(path, parent, ".wh.", name);
        return;
    }
    begin_entry(&found);
    snprintf(at, sizeof at, "/proc/self/fd/%d/%s", directory, name);
    bool opaque = add_attributes(at);
    size_t length = strlen(path);
    const char *first = S_ISDIR(found.st_mode) || found.st_nlink < 2 ? NULL : first_name(found.st_dev, found.st_ino, path);
    if (first) {
        begin_entry(&found);
        write_header(path, '1', &found, first);
    } else if (S_ISDIR(found.st_mode))
        write_directory(directory, name, path, length, &found, opaque);
    else if (S_ISREG(found.st_mode))
        write_file(directory, name, path, &found);
    else if (S_ISLNK(found.st_mode)) {
        ssize_t bytes = readlinkat(directory, name, link, sizeof link - 1);
        if (bytes < 0)
            fail("read the link", path);
        link[bytes] = 0;
        const struct timespec unread[2] = {found.st_atim, {.tv_nsec = UTIME_OMIT}};
        if (purpose == WHOLE && utimensat(directory, name, unread, AT_SYMLINK_NOFOLLOW) < 0 && errno != EROFS)
            fail("leave unread", path);
        write_header(path, '2', &found, link);
    } else
        write_header(path, S_ISCHR(found.st_mode) ? '3' : S_ISBLK(found.st_mode) ? '4' : '6', &found, "");
}

static int by_bytes(const void *one, const void *other) {
    return strcmp(*(char *const *)one, *(char *const *)other);
}

/* The names in a directory, in order. Not by scandirat(3), which opens it again and leaves the time of that. */
static char **names_in(int directory, const char *path, size_t *count) {
    size_t room = 64;
    char **names = malloc(room * sizeof *names);
    DIR *stream = fdopendir(dup(directory));
    if (!stream || !names)
        fail("list", path);
    *count = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(stream));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (*count == room)
            names = realloc(names, (room *= 2) * sizeof *names);
        if (!names || !(names[(*count)++] = strdup(entry->d_name)))
            fail("list", path);
    }
    if (errno)
        fail("list", path);
    closedir(stream);
    qsort(names, *count, sizeof *names, by_bytes);
    return names;
}

/* Takes `directory`, whose name (with a slash, if it is not the root) are the first `length` bytes of `path`. */
static void write_tree(int directory, char *path, size_t length) {
    size_t count;
    char **names = names_in(directory, path, &count);
    for (size_t i = 0; i < count; i++) {
        if (length + strlen(names[i]) + 2 > PATH_BYTES) {
            errno = ENAMETOOLONG;
            fail("name", path);
        }
        strcpy(path + length, names[i]);
        if (purpose != LAYER || !is_left_out(path))
            write_entry(directory, names[i], path, length);
        free(names[i]);
    }
    path[length] = 0;
    free(names);
    close(directory);
}

static void write_root(int directory) {
    struct stat found;
    char at[64];
    if (fstat(directory, &found) < 0)
        fail("look at", "the directory");
    begin_entry(&found);
    snprintf(at, sizeof at, "/proc/self/fd/%d/.", directory);
    add_attributes(at);
    write_header("./", '5', &found, "");
}

int open_tree_root(const char *path, enum purpose of) {
    purpose = of;
    return open(path, O_DIRECTORY | (open_flags() & ~O_NOFOLLOW));
}

void write_directory_tree(int directory, enum purpose of) {
    static char path[PATH_BYTES];
    struct stat found;
    purpose = of;
    if (fstat(directory, &found) < 0)
        fail("look at", "the directory");
    file_system = found.st_dev;
    if (of == WHOLE)
        write_root(directory);
    write_tree(directory, path, 0);
}

void write_single(int directory, const char *name) {
    static char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s", name);
    write_entry(directory, name, path, 0);
}
