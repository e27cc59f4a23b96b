/* Input, output, paths and storing for slotfiles. See slotfiles.h. */
#define _GNU_SOURCE
#include "slotfiles.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_LINKS = 40 };

/* ---- stdin and stdout ---- */

static char input[CHUNK], output[CHUNK];
static size_t input_at, input_end, output_end;

void flush(void) {
    for (size_t at = 0; at < output_end;) {
        ssize_t wrote = write(1, output + at, output_end - at);
        if (wrote < 0 && errno != EINTR)
            fail(errno);
        at += wrote > 0 ? (size_t)wrote : 0;
    }
    output_end = 0;
}

void put(const void *bytes, size_t count) {
    for (const char *from = bytes; count;) {
        size_t part = count < CHUNK - output_end ? count : CHUNK - output_end;
        memcpy(output + output_end, from, part);
        output_end += part, from += part, count -= part;
        if (output_end == CHUNK)
            flush();
    }
}

size_t take_some(const char **bytes, uint64_t wanted) {
    while (input_at == input_end) {
        ssize_t got = read(0, input, sizeof input);
        if (got == 0)
            fail(INPUT_CUT_SHORT);
        if (got < 0 && errno != EINTR)
            fail(errno);
        input_at = 0;
        input_end = got > 0 ? (size_t)got : 0;
    }
    size_t part = wanted < input_end - input_at ? (size_t)wanted : input_end - input_at;
    *bytes = input + input_at;
    input_at += part;
    return part;
}

void take(void *into, size_t count) {
    for (char *to = into; count;) {
        const char *bytes;
        size_t part = take_some(&bytes, count);
        memcpy(to, bytes, part);
        to += part, count -= part;
    }
}

/* ---- paths ---- */

/* Whether the text alone leads above where it starts. Asked where something on the way is missing, and
 * the kernel stopped before it came to the `..` that would have left. */
static bool climbs_out(const char *path) {
    long depth = 0;
    while (*path && depth >= 0) {
        size_t bytes = strcspn(path, "/");
        if (bytes == 2 && !memcmp(path, "..", 2))
            depth--;
        else if (bytes && !(bytes == 1 && *path == '.'))
            depth++;
        path += bytes + (path[bytes] == '/');
    }
    return depth < 0;
}

int open_beneath(int base, const char *path, uint64_t flags) {
    struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    long fd;
    int tries = 0;
    do /* EAGAIN: a rename raced with `..`, and the kernel could not be sure */
        fd = syscall(SYS_openat2, base, path, &how, sizeof how);
    while (fd < 0 && (errno == EAGAIN || errno == EINTR) && ++tries < 1000);
    if (fd < 0 && (errno == EXDEV || ((errno == ENOENT || errno == ENOTDIR) && climbs_out(path))))
        fail(OUTSIDE);
    if (fd < 0 && errno == ENOSYS)
        fail(UNSUPPORTED_KERNEL);
    return (int)fd;
}

const char *below_root(const char *path) {
    if (*path != '/')
        return *path ? path : ".";
    size_t bytes = strlen(root_name);
    if (strncmp(path, root_name, bytes) || (path[bytes] && path[bytes] != '/'))
        fail(OUTSIDE);
    path += bytes;
    path += strspn(path, "/");
    return *path ? path : ".";
}

int make_directories(int base, const char *path) {
    char prefix[PATH_BYTES];
    int fd = open_beneath(base, path, O_PATH | O_DIRECTORY);
    if (fd >= 0 || errno != ENOENT)
        return fd;
    for (size_t end = 0; path[end];) {
        size_t begin = end + strspn(path + end, "/");
        end = begin + strcspn(path + begin, "/");
        if (end == begin)
            break;
        if (end >= sizeof prefix) {
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(prefix, path, begin);
        prefix[begin] = 0;
        int parent = open_beneath(base, begin ? prefix : ".", O_PATH | O_DIRECTORY);
        if (parent < 0)
            return -1;
        memcpy(prefix + begin, path + begin, end - begin);
        prefix[end] = 0;
        int failed = mkdirat(parent, prefix + begin, 0755) && errno != EEXIST; /* `..` gives EEXIST too */
        int error = errno;
        close(parent);
        errno = error;
        if (failed)
            return -1;
    }
    return open_beneath(base, path, O_PATH | O_DIRECTORY);
}

void find_place(int base, const char *path, struct place *place) {
    char directory[PATH_BYTES];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
        fail(climbs_out(path) ? OUTSIDE : EISDIR);
    if (strlen(name) >= sizeof place->name || strlen(path) >= sizeof directory)
        fail(ENAMETOOLONG);
    strcpy(place->name, name);
    memcpy(directory, path, (size_t)(name - path));
    directory[name - path] = 0;
    place->directory = make_directories(base, *directory ? directory : ".");
    if (place->directory < 0)
        fail(errno);
    place->exists = !fstatat(place->directory, name, &place->found, AT_SYMLINK_NOFOLLOW);
    if (!place->exists && errno != ENOENT)
        fail(errno);
}

void find_target(const char *path, struct place *place) {
    char current[PATH_BYTES], link[PATH_BYTES / 2];
    if (strlen(path) >= sizeof current)
        fail(ENAMETOOLONG);
    strcpy(current, path);
    for (int links = 0; links < MAX_LINKS; links++) {
        find_place(root, current, place);
        if (!place->exists || !S_ISLNK(place->found.st_mode))
            return;
        ssize_t bytes = readlinkat(place->directory, place->name, link, sizeof link - 1);
        if (bytes < 0)
            fail(errno);
        link[bytes] = 0;
        close(place->directory);
        size_t keep = *link == '/' ? 0 : strlen(current) - strlen(place->name);
        const char *rest = below_root(link);
        if (keep + strlen(rest) >= sizeof current)
            fail(ENAMETOOLONG);
        memmove(current + keep, rest, strlen(rest) + 1);
    }
    fail(ELOOP);
}

/* ---- storing ---- */

void be_patient(void) {
    if (nice(5) < 0) {} /* only a courtesy */
}

void random_name(char name[32]) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        fail(EIO);
    snprintf(name, 32, ".agentenv-%016llx", (unsigned long long)random);
}

/* A new file that has no name yet, so that being killed leaves nothing; where the file system cannot,
 * one named `name`. */
static int open_unnamed(int directory, char name[32], bool *named) {
    random_name(name);
    *named = false;
    int fd = openat(directory, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd;
    *named = true;
    return openat(directory, name, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
}

uint64_t stored_bytes;

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
        stored_bytes += part;
        if (sum)
            sum_add(sum, from, part);
        int error = write_all(fd, from, part);
        if (error)
            return error;
    }
    return 0;
}

/* EBADMSG: what arrived is not what was sent, or the sender gave up. */
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
        if (when.tv_nsec < 0) /* before 1970: C rounds towards zero, the kernel counts nanoseconds upwards */
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
