/* Storing files. See store.h. */
#define _GNU_SOURCE
#include "store.h"

#include "attributes.h"
#include "io.h"
#include "sum.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
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

/* ---- a new file ---- */

static int open_new(struct staged *staged, int directory) {
    *staged->name = 0;
    staged->fd = openat(directory, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (staged->fd >= 0)
        return 0;
    if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
        return errno;
    random_name(staged->name);
    staged->fd = openat(directory, staged->name, O_CREAT | O_EXCL | O_NOFOLLOW | O_RDWR | O_CLOEXEC, 0600);
    if (staged->fd >= 0)
        return 0;
    *staged->name = 0;
    return errno;
}

static bool is_shortage(int error) {
    return error == ENOSPC || error == EDQUOT || error == EMFILE || error == ENFILE || error == ENOMEM;
}

int open_staged(struct staged *staged, const struct place *place, const struct place *like) {
    int error = open_new(staged, place->directory);
    staged->over = false;
    if (like != place) {
        if (!error && like)
            copy_attributes(staged->fd, like); /* as far as they can be given, as mv does between file systems */
        return error;
    }
    if (error && is_shortage(error))
        return error;
    if (error)
        staged->fd = memfd_create("agentenv", MFD_CLOEXEC);
    if (staged->fd < 0)
        return errno;
    staged->over = error || place->found.st_nlink > 1 || copy_attributes(staged->fd, place);
    return 0;
}

int write_staged(struct staged *staged, int mode, const char *content, size_t bytes) {
    int error = write_all(staged->fd, content, bytes);
    return !error && mode != KEPT_MODE && fchmod(staged->fd, (mode_t)mode) ? errno : error;
}

int name_staged(struct staged *staged, int directory) {
    char path[32];
    if (*staged->name)
        return 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", staged->fd);
    random_name(staged->name);
    if (!linkat(AT_FDCWD, path, directory, staged->name, AT_SYMLINK_FOLLOW))
        return 0;
    *staged->name = 0;
    return errno;
}

void drop_staged(struct staged *staged, int directory) {
    if (*staged->name)
        unlinkat(directory, staged->name, 0);
    *staged->name = 0;
    if (staged->fd >= 0)
        close(staged->fd);
    staged->fd = -1;
}

/* ---- the old file ---- */

bool needs_overwrite(int error) {
    return error == EBUSY || error == EPERM || error == EACCES;
}

static int set_times(int fd, const int64_t *modified_ns) {
    if (!modified_ns)
        return 0;
    struct timespec when = {*modified_ns / 1000000000, *modified_ns % 1000000000};
    if (when.tv_nsec < 0) /* before 1970: C rounds towards zero, but the kernel counts nanoseconds upwards */
        when.tv_sec--, when.tv_nsec += 1000000000;
    return futimens(fd, (struct timespec[2]){when, when}) ? errno : 0;
}

/* What can be refused is done before anything is lost. */
static int prepare_overwrite(int fd, int mode, size_t bytes, const int64_t *modified_ns, struct stat *found) {
    if (fstat(fd, found))
        return errno;
    if (bytes && fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes) && (is_shortage(errno) || errno == EFBIG)) {
        int error = errno;
        return ftruncate(fd, found->st_size) ? errno : error; /* gives back what was allocated */
    }
    if (mode != KEPT_MODE && (found->st_mode & 07777) != (mode_t)mode && fchmod(fd, (mode_t)mode))
        return errno;
    return set_times(fd, modified_ns);
}

int overwrite(const struct place *place, int mode, const char *content, size_t bytes, const int64_t *modified_ns) {
    struct stat found;
    int fd = open_found(place);
    if (fd < 0)
        return errno;
    int error = prepare_overwrite(fd, mode, bytes, modified_ns, &found);
    if (!error)
        error = write_all(fd, content, bytes);
    if (!error && (!bytes || (uint64_t)found.st_size > bytes) && ftruncate(fd, (off_t)bytes))
        error = errno;
    if (!error)
        error = set_times(fd, modified_ns);
    close(fd);
    return error;
}

static int overwrite_from(const struct place *place, int mode, int from, const int64_t *modified_ns) {
    struct stat found;
    if (fstat(from, &found))
        return errno;
    size_t bytes = (size_t)found.st_size;
    void *content = bytes ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, from, 0) : NULL;
    if (content == MAP_FAILED)
        return errno;
    int error = overwrite(place, mode, content, bytes, modified_ns);
    if (bytes)
        munmap(content, bytes);
    return error;
}

/* ---- either ---- */

static int replace(const struct place *place, int mode, struct staged *staged, const int64_t *modified_ns) {
    if (mode != KEPT_MODE && fchmod(staged->fd, (mode_t)mode))
        return errno;
    int error = set_times(staged->fd, modified_ns);
    if (!error)
        error = name_staged(staged, place->directory);
    if (!error && renameat(place->directory, staged->name, place->directory, place->name))
        error = errno;
    if (!error)
        *staged->name = 0;
    return error;
}

/* What is being stored, for when we fail within: its input may end early. */
static struct { struct staged staged; int directory; } storing;

static void take_back(void) {
    drop_staged(&storing.staged, storing.directory);
}

void store(const struct place *place, int mode, uint64_t bytes, const int64_t *modified_ns) {
    bool replaces = place->exists && S_ISREG(place->found.st_mode);
    struct staged *staged = &storing.staged;
    int error = open_staged(staged, place, replaces ? place : NULL);
    if (error)
        fail(error);
    storing.directory = place->directory;
    undo_with(take_back);
    error = copy_input(staged->fd, bytes);
    if (!error && !staged->over)
        error = replace(place, mode == KEPT_MODE && !replaces ? 0644 : mode, staged, modified_ns);
    if (staged->over ? !error : replaces && needs_overwrite(error))
        error = overwrite_from(place, mode, staged->fd, modified_ns);
    if (error)
        fail(error);
    undo_with(NULL);
    drop_staged(staged, place->directory);
}
