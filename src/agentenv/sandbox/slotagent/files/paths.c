/* Finding, opening and making what paths name. See paths.h. */
#define _GNU_SOURCE
#include "paths.h"

#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_LINKS = 40 };

static const char *root_name;
static int root_fd;
static bool fenced;

void open_root(const char *name, bool fence) {
    root_name = name;
    fenced = fence;
    root_fd = open(name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        fail(errno);
}

int root(void) {
    return root_fd;
}

bool is_root(const char *name) {
    return !strcmp(name, root_name);
}

/* Whether the text alone leads above where it starts. This matters where something on the way is missing, because the
 * kernel then stops before it comes to the `..` that would have led out. */
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
    bool beneath = fenced || base != root_fd;
    struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
    how.resolve |= beneath ? RESOLVE_BENEATH : 0;
    long fd;
    int tries = 0;
    do /* EAGAIN: a rename raced with `..`, so the kernel could not be sure */
        fd = syscall(SYS_openat2, base, path, &how, sizeof how);
    while (fd < 0 && (errno == EAGAIN || errno == EINTR) && ++tries < 1000);
    if (fd < 0 && beneath && (errno == EXDEV || ((errno == ENOENT || errno == ENOTDIR) && climbs_out(path))))
        fail(OUTSIDE);
    if (fd < 0 && errno == ENOSYS)
        fail(UNSUPPORTED_KERNEL);
    return (int)fd;
}

const char *from_root(const char *path) {
    if (*path != '/')
        return *path ? path : ".";
    size_t bytes = strlen(root_name);
    if (strncmp(path, root_name, bytes) || (path[bytes] && path[bytes] != '/')) {
        if (fenced)
            fail(OUTSIDE);
        return path;
    }
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

static int existing_directory(int base, const char *path) {
    return open_beneath(base, path, O_PATH | O_DIRECTORY);
}

static void find(int base, const char *path, struct place *place, int (*open_directory)(int, const char *)) {
    char directory[PATH_BYTES];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
        fail((fenced || base != root_fd) && climbs_out(path) ? OUTSIDE
             : open_directory == make_directories            ? EISDIR
                                                             : EBUSY);
    if (strlen(name) >= sizeof place->name || strlen(path) >= sizeof directory)
        fail(ENAMETOOLONG);
    strcpy(place->name, name);
    memcpy(directory, path, (size_t)(name - path));
    directory[name - path] = 0;
    place->directory = open_directory(base, *directory ? directory : ".");
    if (place->directory < 0)
        fail(errno);
    place->exists = !fstatat(place->directory, name, &place->found, AT_SYMLINK_NOFOLLOW);
    if (!place->exists && errno != ENOENT)
        fail(errno);
}

void find_place(int base, const char *path, struct place *place) {
    find(base, path, place, make_directories);
}

void find_entry(const char *path, struct place *place) {
    char whole[PATH_BYTES];
    size_t bytes = strlen(path);
    if (bytes >= sizeof whole)
        fail(ENAMETOOLONG);
    strcpy(whole, path);
    while (bytes > 1 && whole[bytes - 1] == '/')
        whole[--bytes] = 0;
    find(root_fd, whole, place, existing_directory);
}

void find_target(const char *path, struct place *place) {
    char current[PATH_BYTES], link[PATH_BYTES / 2];
    if (strlen(path) >= sizeof current)
        fail(ENAMETOOLONG);
    strcpy(current, path);
    for (int links = 0; links < MAX_LINKS; links++) {
        find_place(root_fd, current, place);
        if (!place->exists || !S_ISLNK(place->found.st_mode))
            return;
        ssize_t bytes = readlinkat(place->directory, place->name, link, sizeof link - 1);
        if (bytes < 0)
            fail(errno);
        link[bytes] = 0;
        close(place->directory);
        size_t keep = *link == '/' ? 0 : strlen(current) - strlen(place->name);
        const char *rest = from_root(link);
        if (keep + strlen(rest) >= sizeof current)
            fail(ENAMETOOLONG);
        memmove(current + keep, rest, strlen(rest) + 1);
    }
    fail(ELOOP);
}
