/* Owner, mode, access list and extended attributes of a file. See attributes.h. */
#define _GNU_SOURCE
#include "attributes.h"

#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { XATTR_SIZE_LIMIT = 65536 };

static void path_of(int fd, char path[32]) {
    snprintf(path, 32, "/proc/self/fd/%d", fd);
}

static int find_again(const struct place *place) {
    struct stat found;
    int fd = openat(place->directory, place->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (!fstat(fd, &found) && found.st_ino == place->found.st_ino && found.st_dev == place->found.st_dev)
        return fd;
    close(fd);
    errno = ESTALE;
    return -1;
}

/* The numbers are compared before it is opened for writing: overlayfs copies a file then, and gives it others. */
int open_found(const struct place *place) {
    char path[32];
    int found = find_again(place);
    if (found < 0)
        return -1;
    path_of(found, path);
    int fd = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), error = errno;
    close(found);
    errno = error;
    return fd;
}

/* Writing to a file takes its capabilities away, so that they are not copied. */
static bool is_kept(const char *name) {
    return strcmp(name, "security.capability");
}

static int copy_one(int fd, const char *from, const char *name) {
    static char value[XATTR_SIZE_LIMIT];
    ssize_t bytes = getxattr(from, name, value, sizeof value);
    if (bytes < 0)
        return errno == ENODATA ? 0 : errno;
    return fsetxattr(fd, name, value, (size_t)bytes, 0) ? errno : 0;
}

/* An access list is an attribute, too: the new file must not keep the one that its directory gave it. */
static int copy_extended(int fd, const char *from) {
    static char names[XATTR_SIZE_LIMIT];
    if (fremovexattr(fd, "system.posix_acl_access") && errno != ENODATA && errno != EOPNOTSUPP)
        return errno;
    ssize_t bytes = listxattr(from, names, sizeof names);
    if (bytes < 0)
        return errno == EOPNOTSUPP ? 0 : errno;
    for (const char *name = names; name < names + bytes; name += strlen(name) + 1) {
        int error = is_kept(name) ? copy_one(fd, from, name) : 0;
        if (error)
            return error;
    }
    return 0;
}

int copy_attributes(int fd, const struct place *from) {
    char path[32];
    struct stat was, is;
    int old = find_again(from);
    if (old < 0)
        return errno;
    path_of(old, path);
    int error = fstat(old, &was) || fstat(fd, &is) ? errno : 0;
    if (error) {
        close(old);
        return error;
    }
    if ((was.st_uid != is.st_uid || was.st_gid != is.st_gid) && fchown(fd, was.st_uid, was.st_gid))
        error = errno;
    int failed = copy_extended(fd, path);
    error = error ? error : failed;
    /* Of another owner's file the set-id bits would mean another user. Otherwise they stay or go as they do when this
     * user writes to the file. */
    if (fchmod(fd, was.st_mode & (error ? 0777 : 07777)) || ftruncate(fd, 0))
        error = errno;
    close(old);
    return error;
}
