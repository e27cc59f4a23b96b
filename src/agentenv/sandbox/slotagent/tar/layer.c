/* See layer.h. */
#define _GNU_SOURCE
#include "layer.h"

#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { OPEN_DIRECTORIES = 64 };

static const char *const LEFT_OUT[] = {"dev", "proc", "sys", "run/agentenv", "etc/hosts", "etc/hostname",
                                       "etc/resolv.conf"};

static int *layers_above;
static int layers_count;

bool is_left_out(const char *path) {
    for (size_t i = 0; i < sizeof LEFT_OUT / sizeof *LEFT_OUT; i++)
        if (!strcmp(path, LEFT_OUT[i]))
            return true;
    return false;
}

bool is_mark(const struct stat *found) {
    return S_ISCHR(found->st_mode) && found->st_rdev == makedev(0, 0);
}

bool is_reserved(const char *name) {
    return !strncmp(name, ".wh.", 4);
}

static bool is_opaque(int layer, const char *path) {
    char at[64 + PATH_MAX], value;
    snprintf(at, sizeof at, "/proc/self/fd/%d/%s", layer, path);
    return lgetxattr(at, "user.overlay.opaque", &value, 1) == 1 && value == 'y';
}

/* Whether the layer has something at the path, or instead of a directory on the way to it. */
static bool covers(int layer, char *path) {
    for (char *slash = path; slash;) {
        struct stat found;
        slash = strchr(slash, '/');
        if (slash)
            *slash = 0;
        bool there = !fstatat(layer, path, &found, AT_SYMLINK_NOFOLLOW);
        if (!there && errno != ENOENT)
            fail("look at", path);
        bool covered = there && (!slash || !S_ISDIR(found.st_mode) || is_opaque(layer, path));
        if (slash)
            *slash++ = '/';
        if (!there || covered)
            return covered;
    }
    return false;
}

static bool is_hidden(const char *path) {
    char copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", path);
    for (int i = 0; i < layers_count; i++)
        if (covers(layers_above[i], copy))
            return true;
    return false;
}

static int look(const char *path, const struct stat *found, int what, struct FTW *place) {
    if (what == FTW_DNR || what == FTW_NS)
        fail("read", path);
    if (strlen(path) >= PATH_MAX) {
        errno = ENAMETOOLONG;
        fail("name", "a file whose path has more than 4096 bytes");
    }
    const char *name = path + place->base;
    path += 2; /* "./" */
    if (place->level && is_left_out(path))
        return FTW_SKIP_SUBTREE;
    if (!place->level || !is_reserved(name) || is_mark(found) || S_ISSOCK(found->st_mode))
        return FTW_CONTINUE;
    if (is_hidden(path))
        return FTW_SKIP_SUBTREE;
    fputs(path, stdout);
    return FTW_STOP;
}

void print_reserved(const char *directory, char **above, int count) {
    layers_above = calloc((size_t)count + 1, sizeof *layers_above);
    if (!layers_above)
        fail("allocate", "layers");
    for (; layers_count < count; layers_count++)
        if ((layers_above[layers_count] = open(above[layers_count], O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0)
            fail("open", above[layers_count]);
    if (chdir(directory) < 0 || nftw(".", look, OPEN_DIRECTORIES, FTW_PHYS | FTW_ACTIONRETVAL) < 0 || fflush(stdout))
        fail("look through", directory);
}
