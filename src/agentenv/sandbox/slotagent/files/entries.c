/* Looking at, making, renaming and removing what paths name. See entries.h. */
#define _GNU_SOURCE
#include "entries.h"

#include "io.h"
#include "paths.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DEPTH = 512 }; /* each level keeps a descriptor open */

static void put_done(void) {
    struct record record = {.kind = 'e'};
    put(&record, sizeof record);
}

void run_stat(const char *path, bool follow) {
    struct stat found;
    int fd = open_beneath(root(), from_root(path), O_PATH | (follow ? 0 : O_NOFOLLOW));
    if (fd < 0 || fstat(fd, &found))
        fail(errno);
    struct record record = {
        .kind = S_ISREG(found.st_mode) ? 'f' : S_ISDIR(found.st_mode) ? 'd' : S_ISLNK(found.st_mode) ? 'l' : 'o',
        .mode = found.st_mode & 07777,
        .size = (uint64_t)found.st_size,
        .modified_ns = found.st_mtim.tv_sec * 1000000000 + found.st_mtim.tv_nsec,
    };
    put(&record, sizeof record);
}

void run_mkdir(const char *path, bool parents, bool exist_ok) {
    struct stat found;
    struct place place;
    int fd = open_beneath(root(), from_root(path), O_PATH);
    if (fd >= 0) {
        if (fstat(fd, &found))
            fail(errno);
        if (!exist_ok || !S_ISDIR(found.st_mode))
            fail(EEXIST);
    } else if (errno != ENOENT) {
        fail(errno);
    } else if (parents) {
        if (make_directories(root(), from_root(path)) < 0)
            fail(errno == ENOENT ? EEXIST : errno); /* a link that leads nowhere has the name */
    } else {
        find_entry(from_root(path), &place);
        if (mkdirat(place.directory, place.name, 0755))
            fail(errno);
    }
    put_done();
}

void run_rename(const char *path, const char *target) {
    struct place from, to;
    find_entry(from_root(path), &from);
    find_entry(from_root(target), &to);
    if (renameat(from.directory, from.name, to.directory, to.name))
        fail(errno);
    put_done();
}

/* Removes `name`; with `tree`, what is in it first. Something else may remove things at the same time. */
static void remove_entry(int directory, const char *name, bool tree, int depth) {
    if (!unlinkat(directory, name, 0) || (depth && errno == ENOENT))
        return;
    if (errno != EISDIR || !tree)
        fail(errno);
    if (depth == MAX_DEPTH)
        fail(ENAMETOOLONG);
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream)
        fail(errno);
    for (struct dirent *entry; (entry = readdir(stream));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            remove_entry(fd, entry->d_name, tree, depth + 1);
    closedir(stream);
    if (unlinkat(directory, name, AT_REMOVEDIR))
        fail(errno);
}

void run_remove(const char *path, bool tree) {
    struct place place;
    find_entry(from_root(path), &place);
    remove_entry(place.directory, place.name, tree, 0);
    put_done();
}
