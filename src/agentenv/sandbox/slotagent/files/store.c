/* Storing files. See store.h. */
#define _GNU_SOURCE
#include "store.h"

#include "io.h"
#include "sum.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static uint64_t stored;

uint64_t stored_bytes(void) {
    return stored;
}

void random_name(char name[32]) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        fail(EIO);
    snprintf(name, 32, ".agentenv-%016llx", (unsigned long long)random);
}

/* A new file without a name yet, so that nothing is left of it when we are killed; where the file system has no such
 * files, one named `name`. */
static int open_unnamed(int directory, char name[32], bool *named) {
    random_name(name);
    *named = false;
    int fd = openat(directory, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd;
    *named = true;
    return openat(directory, name, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
}

static int write_all(int fd, const char *from, size_t bytes) {
    while (bytes) {
        ssize_t wrote = write(fd, from, bytes);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return wrote ? errno : EIO;
        from += wrote, bytes -= (size_t)wrote;
    }
    return 0;
}

static int copy_bytes(int fd, uint64_t bytes, struct sum *sum) {
    while (bytes) {
        const char *from;
        size_t part = take_some(&from, bytes);
        bytes -= part;
        stored += part;
        if (sum)
            sum_add(sum, from, part);
        int error = write_all(fd, from, part);
        if (error)
            return error;
    }
    return 0;
}

/* Returns an errno or 0; EBADMSG when what arrived is not what was sent, or the sender gave up. */
static int copy_chunks(int fd) {
    unsigned char announced[SUM_BYTES], found[SUM_BYTES];
    struct sum sum;
    sum_begin(&sum);
    for (;;) {
        uint32_t bytes;
        take(&bytes, sizeof bytes);
        if (bytes > CHUNK)
            return EBADMSG;
        if (!bytes)
            break;
        int error = copy_bytes(fd, bytes, &sum);
        if (error)
            return error;
    }
    sum_end(&sum, found);
    take(announced, sizeof announced);
    return memcmp(announced, found, sizeof found) ? EBADMSG : 0;
}

static int copy_input(int fd, uint64_t bytes) {
    return bytes == CHUNKED ? copy_chunks(fd) : copy_bytes(fd, bytes, NULL);
}

int give_name(int fd, int directory, const char *name) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, path, directory, name, AT_SYMLINK_FOLLOW) ? errno : 0;
}

int stage(const struct place *place, mode_t mode, const char *content, size_t bytes, char name[32], int *fd) {
    bool named;
    *fd = open_unnamed(place->directory, name, &named);
    if (*fd < 0)
        return errno;
    int error = write_all(*fd, content, bytes);
    if (!error && fchmod(*fd, mode))
        error = errno;
    if (error && named)
        unlinkat(place->directory, name, 0);
    if (error || !named)
        *name = 0;
    if (error || named) {
        close(*fd);
        *fd = -1;
    }
    return error;
}

void store(const struct place *place, mode_t mode, uint64_t bytes, const int64_t *modified_ns) {
    char name[32];
    bool named;
    int fd = open_unnamed(place->directory, name, &named);
    if (fd < 0)
        fail(errno);
    int error = copy_input(fd, bytes);
    if (!error && fchmod(fd, mode))
        error = errno;
    if (!error && modified_ns) {
        struct timespec when = {*modified_ns / 1000000000, *modified_ns % 1000000000};
        if (when.tv_nsec < 0) /* before 1970: C rounds towards zero, but the kernel counts nanoseconds upwards */
            when.tv_sec--, when.tv_nsec += 1000000000;
        if (futimens(fd, (struct timespec[2]){when, when}))
            error = errno;
    }
    if (!error && !named) {
        error = give_name(fd, place->directory, name);
        named = !error;
    }
    if (!error && renameat(place->directory, name, place->directory, place->name))
        error = errno;
    if (error && named)
        unlinkat(place->directory, name, 0);
    close(fd);
    if (error)
        fail(error);
}
