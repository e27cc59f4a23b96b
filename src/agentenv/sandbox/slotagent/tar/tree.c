/* See tree.h. */
#define _GNU_SOURCE
#include "tree.h"

#include "links.h"
#include "steps.h"
#include "write.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { PATH_BYTES = 8192, VALUE_BYTES = 64 * 1024, CHUNK = 128 * 1024 };

static const char *const SKIPPED[] = {"dev", "proc", "sys", "run/agentenv", "etc/hosts", "etc/hostname",
                                      "etc/resolv.conf"};

static bool as_layer;

static bool is_skipped(const char *path) {
    for (size_t i = 0; as_layer && i < sizeof SKIPPED / sizeof *SKIPPED; i++)
        if (!strcmp(path, SKIPPED[i]))
            return true;
    return false;
}

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
        if (!strncmp(name, "user.overlay.", 13)) {
            opaque |= !strcmp(name + 13, "opaque") && size == 1 && *value == 'y';
            continue;
        }
        snprintf(key, sizeof key, "SCHILY.xattr.%.*s", XATTR_NAME_MAX, name);
        add_record(key, value, (size_t)size);
    }
    return opaque;
}

static void write_file(int directory, const char *name, const char *path, const struct stat *found) {
    static char chunk[CHUNK];
    int fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        fail("open", path);
    for (off_t left = found->st_size; left > 0;) {
        ssize_t got = read(fd, chunk, left < CHUNK ? (size_t)left : CHUNK);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            fail("read", path);
        write_content(chunk, (size_t)got);
        left -= got;
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

static void write_tree(int directory, char *path, size_t length);

static void write_directory(int parent, const char *name, char *path, size_t length, const struct stat *found,
                            bool opaque) {
    path[length] = '/';
    path[length + 1] = 0;
    write_header(path, '5', found, "");
    if (opaque && as_layer)
        write_marker(path, length + 1, ".wh..wh..opq", "");
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        fail("open", path);
    write_tree(fd, path, length + 1);
    path[length] = 0;
}

/* `path` names it relative to the layer; `parent` bytes of that are its directory's. */
static void write_entry(int directory, const char *name, char *path, size_t parent) {
    struct stat found;
    char at[320], link[PATH_BYTES] = "";
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) < 0)
        fail("look at", path);
    if (S_ISSOCK(found.st_mode))
        return;
    if (as_layer && S_ISCHR(found.st_mode) && found.st_rdev == makedev(0, 0)) {
        write_marker(path, parent, ".wh.", name);
        return;
    }
    begin_records();
    snprintf(at, sizeof at, "/proc/self/fd/%d/%s", directory, name);
    bool opaque = add_attributes(at);
    size_t length = strlen(path);
    const char *first = S_ISDIR(found.st_mode) || found.st_nlink < 2 ? NULL : first_name(found.st_dev, found.st_ino, path);
    if (first) {
        begin_records();
        write_header(path, '1', &found, first);
    } else if (S_ISDIR(found.st_mode))
        write_directory(directory, name, path, length, &found, opaque);
    else if (S_ISREG(found.st_mode)) {
        write_header(path, '0', &found, "");
        write_file(directory, name, path, &found);
    } else if (S_ISLNK(found.st_mode)) {
        ssize_t bytes = readlinkat(directory, name, link, sizeof link - 1);
        if (bytes < 0)
            fail("read the link", path);
        link[bytes] = 0;
        write_header(path, '2', &found, link);
    } else
        write_header(path, S_ISCHR(found.st_mode) ? '3' : S_ISBLK(found.st_mode) ? '4' : '6', &found, "");
}

static int by_bytes(const struct dirent **one, const struct dirent **other) {
    return strcmp((*one)->d_name, (*other)->d_name);
}

static int is_entry(const struct dirent *entry) {
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

/* Takes `directory`, whose name (with a slash, if it is not the root) are the first `length` bytes of `path`. */
static void write_tree(int directory, char *path, size_t length) {
    struct dirent **entries;
    int count = scandirat(directory, ".", &entries, is_entry, by_bytes);
    if (count < 0)
        fail("list", path);
    for (int i = 0; i < count; i++) {
        const char *name = entries[i]->d_name;
        if (length + strlen(name) + 2 > PATH_BYTES) {
            errno = ENAMETOOLONG;
            fail("name", path);
        }
        strcpy(path + length, name);
        if (!is_skipped(path))
            write_entry(directory, name, path, length);
        free(entries[i]);
    }
    path[length] = 0;
    free(entries);
    close(directory);
}

void write_directory_tree(int directory, bool layer) {
    static char path[PATH_BYTES];
    as_layer = layer;
    write_tree(directory, path, 0);
}

void write_single(int directory, const char *name) {
    static char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s", name);
    write_entry(directory, name, path, 0);
}
