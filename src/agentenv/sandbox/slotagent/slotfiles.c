/* slotfiles: one file operation inside a slot, under the slot's uid, beneath its workspace.
 *
 *   slotfiles ROOT read PATH OFFSET LIMIT
 *   slotfiles ROOT write PATH MODE|- BYTES          content on stdin
 *   slotfiles ROOT list PATH DEPTH LIMIT HIDDEN
 *   slotfiles ROOT archive PATH MAX_BYTES MAX_ENTRIES
 *   slotfiles ROOT extract PATH                     records on stdin
 *
 * docs/slot-agent.md has the exit codes and the records; sandbox/tools/files.py is the other side.
 * PATH is relative to ROOT, or absolute below it. The kernel keeps every lookup beneath ROOT
 * (openat2, RESOLVE_BENEATH), so symlinks, `..` and races of the slot's processes cannot leave it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Exit codes below 128 are errnos; these are our own verdicts. */
enum { OUTSIDE = 200, UNSUPPORTED_KERNEL = 201, NOT_REGULAR = 202, INPUT_CUT_SHORT = 203, TOO_LARGE = 204, USAGE = 205 };
enum { PATH_BYTES = 8192, CHUNK = 65536, MAX_LINKS = 40, MAX_DEPTH = 512 };

/* Followed by the path and the link's target; in an archive and for 'f', content follows. */
struct record {
    uint8_t kind; /* f(ile) d(irectory) l(ink) o(ther) m(ode of a directory made before) e(nd) */
    uint8_t truncated; /* of 'e': the limit cut the list */
    uint16_t mode;
    uint32_t path_bytes, link_bytes, zero;
    uint64_t size;
    int64_t modified_ns;
};
_Static_assert(sizeof(struct record) == 32, "the record is 32 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, unswapped");

static const char *root_name;
static int root;

static _Noreturn void fail(int code) {
    const char *text = code < 128 ? strerror(code) : "refused";
    if (write(2, text, strlen(text)) < 0 || write(2, "\n", 1) < 0) {}
    _exit(code > 0 && code < 128 ? code : code >= OUTSIDE && code <= USAGE ? code : EIO);
}

static uint64_t number(const char *text) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end || *text < '0' || *text > '9')
        fail(USAGE);
    return value;
}

/* ---- stdin and stdout ---- */

static char input[CHUNK], output[CHUNK];
static size_t input_at, input_end, output_end;

static void flush(void) {
    for (size_t at = 0; at < output_end;) {
        ssize_t wrote = write(1, output + at, output_end - at);
        if (wrote < 0 && errno != EINTR)
            fail(errno);
        at += wrote > 0 ? (size_t)wrote : 0;
    }
    output_end = 0;
}

static void put(const void *bytes, size_t count) {
    for (const char *from = bytes; count;) {
        size_t part = count < CHUNK - output_end ? count : CHUNK - output_end;
        memcpy(output + output_end, from, part);
        output_end += part, from += part, count -= part;
        if (output_end == CHUNK)
            flush();
    }
}

/* Up to `wanted` bytes of stdin, in place; never none. */
static size_t take_some(const char **bytes, uint64_t wanted) {
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

static void take(void *into, size_t count) {
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

/* -1 with errno on failure; does not return when the path leaves `base`. */
static int open_beneath(int base, const char *path, uint64_t flags) {
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

/* The path below ROOT that `path` names; does not return when it names another. */
static const char *below_root(const char *path) {
    if (*path != '/')
        return *path ? path : ".";
    size_t bytes = strlen(root_name);
    if (strncmp(path, root_name, bytes) || (path[bytes] && path[bytes] != '/'))
        fail(OUTSIDE);
    path += bytes;
    path += strspn(path, "/");
    return *path ? path : ".";
}

/* Opens a directory of which any part may be missing, making it. */
static int make_directories(int base, const char *path) {
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

/* Where a file is to be: an open directory and a name in it. */
struct place { int directory; char name[256]; bool exists; struct stat found; };

static void find_place(int base, const char *path, struct place *place) {
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

/* As find_place, and where the name is a symlink, the place it points to (which may not exist yet). */
static void find_target(const char *path, struct place *place) {
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

static void random_name(char name[32]) {
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

static int copy_input(int fd, uint64_t bytes) {
    while (bytes) {
        const char *from;
        size_t part = take_some(&from, bytes);
        bytes -= part;
        while (part) {
            ssize_t wrote = write(fd, from, part);
            if (wrote < 0 && errno == EINTR)
                continue;
            if (wrote <= 0)
                return wrote ? errno : EIO;
            from += wrote, part -= (size_t)wrote;
        }
    }
    return 0;
}

static int give_name(int fd, int directory, const char *name) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, path, directory, name, AT_SYMLINK_FOLLOW) ? errno : 0;
}

/* Puts `bytes` of stdin at `place`, all or nothing: a full disk leaves the old file as it was. */
static void store(const struct place *place, mode_t mode, uint64_t bytes, const int64_t *modified_ns) {
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

/* ---- the operations ---- */

static void run_read(const char *path, uint64_t offset, uint64_t limit) {
    /* O_NONBLOCK: opening a FIFO nobody writes to would wait for ever. */
    int fd = open_beneath(root, below_root(path), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    struct stat found;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (!S_ISREG(found.st_mode))
        fail(S_ISDIR(found.st_mode) ? EISDIR : NOT_REGULAR);
    struct record record = {.kind = 'f', .mode = found.st_mode & 07777, .size = (uint64_t)found.st_size};
    put(&record, sizeof record);
    while (limit && offset < INT64_MAX - CHUNK) { /* pread takes no larger ones, and no file has them */
        char chunk[CHUNK];
        ssize_t got = pread(fd, chunk, limit < sizeof chunk ? (size_t)limit : sizeof chunk, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            fail(errno);
        if (!got)
            break;
        put(chunk, (size_t)got);
        offset += (uint64_t)got, limit -= (uint64_t)got;
    }
}

static void run_write(const char *path, const char *mode, uint64_t bytes) {
    struct place place;
    find_target(below_root(path), &place);
    if (place.exists && !S_ISREG(place.found.st_mode))
        fail(S_ISDIR(place.found.st_mode) ? EISDIR : NOT_REGULAR);
    /* rename would replace a read-only file without asking; a shell's `>` would not. */
    if (place.exists && faccessat(place.directory, place.name, W_OK, AT_EACCESS))
        fail(errno);
    mode_t wanted = place.exists ? place.found.st_mode & 0777 : 0644;
    if (strcmp(mode, "-"))
        wanted = (mode_t)number(mode) & 0777;
    store(&place, wanted, bytes, NULL);
    struct record record = {.kind = place.exists ? 'f' : 'n', .mode = (uint16_t)wanted, .size = bytes};
    put(&record, sizeof record);
}

struct walk { bool archive, hidden, full; uint64_t depth, entries_left, bytes_left; char path[PATH_BYTES]; };

static void put_record(const struct walk *walk, char kind, const struct stat *found, const char *link, size_t link_bytes) {
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

/* Content as `u32 bytes, bytes` until a zero: the file may change while it is read. */
static void put_content(struct walk *walk, int fd) {
    char chunk[CHUNK];
    for (;;) {
        ssize_t got = read(fd, chunk, sizeof chunk);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            fail(errno);
        if ((uint64_t)got > walk->bytes_left)
            fail(TOO_LARGE);
        walk->bytes_left -= (uint64_t)got;
        uint32_t bytes = (uint32_t)got;
        put(&bytes, sizeof bytes);
        put(chunk, bytes);
        if (!got)
            return;
    }
}

static void archive_file(struct walk *walk, int fd) {
    struct stat found;
    if (fstat(fd, &found))
        fail(errno);
    if (S_ISREG(found.st_mode)) { /* else it was swapped since it was listed */
        put_record(walk, 'f', &found, NULL, 0);
        put_content(walk, fd);
    }
}

static void walk_directory(struct walk *walk, int fd, uint64_t depth);

static void visit(struct walk *walk, int directory, const char *name, uint64_t depth) {
    struct stat found;
    char link[PATH_BYTES / 2];
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW))
        return; /* gone since it was listed */
    char kind = S_ISREG(found.st_mode) ? 'f' : S_ISDIR(found.st_mode) ? 'd' : S_ISLNK(found.st_mode) ? 'l' : 'o';
    if (walk->archive && kind == 'o')
        return;
    if (!walk->entries_left) {
        walk->full = true;
        return;
    }
    walk->entries_left--;
    if (walk->archive && kind == 'f') {
        int fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd < 0 && errno != ENOENT)
            fail(errno);
        if (fd >= 0) {
            archive_file(walk, fd);
            close(fd);
        }
        return;
    }
    ssize_t link_bytes = kind == 'l' ? readlinkat(directory, name, link, sizeof link) : 0;
    put_record(walk, kind, &found, link, link_bytes > 0 ? (size_t)link_bytes : 0);
    if (kind != 'd' || depth >= walk->depth)
        return;
    if (depth >= MAX_DEPTH)
        fail(ENAMETOOLONG);
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0)
        walk_directory(walk, fd, depth + 1);
    else if (walk->archive && errno != ENOENT)
        fail(errno); /* an archive that silently lacks a part would be a lie; a listing shows the entry */
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

static void run_walk(struct walk *walk, const char *path) {
    path = below_root(path);
    int fd = open_beneath(root, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    struct stat found;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (S_ISDIR(found.st_mode)) {
        walk_directory(walk, fd, 1);
    } else {
        if (!walk->archive)
            fail(ENOTDIR);
        if (!S_ISREG(found.st_mode))
            fail(NOT_REGULAR);
        const char *slash = strrchr(path, '/');
        snprintf(walk->path, sizeof walk->path, "%s", slash ? slash + 1 : path);
        archive_file(walk, fd);
    }
    if (walk->archive && walk->full)
        fail(TOO_LARGE);
    struct record end = {.kind = 'e', .truncated = walk->full};
    put(&end, sizeof end);
}

static void extract_link(const struct place *place, const char *link) {
    if (place->exists && unlinkat(place->directory, place->name, 0))
        fail(errno);
    if (symlinkat(link, place->directory, place->name))
        fail(errno);
}

/* One record of stdin beneath `base`. A link made by an earlier record may lead to another directory
 * beneath it, never out of it. */
static void extract_record(int base, const struct record *record) {
    static char path[PATH_BYTES], link[PATH_BYTES];
    struct place place;
    if (record->path_bytes >= sizeof path || record->link_bytes >= sizeof link)
        fail(ENAMETOOLONG);
    take(path, record->path_bytes);
    take(link, record->link_bytes);
    path[record->path_bytes] = link[record->link_bytes] = 0;
    if (record->kind == 'd' || record->kind == 'm') {
        int fd = make_directories(base, path);
        if (fd < 0)
            fail(errno);
        close(fd);
        if (record->kind == 'm') { /* fchmod refuses O_PATH descriptors */
            fd = open_beneath(base, path, O_RDONLY | O_DIRECTORY);
            if (fd < 0 || fchmod(fd, record->mode & 0777))
                fail(errno);
            close(fd);
        }
        return;
    }
    find_place(base, path, &place);
    if (place.exists && S_ISDIR(place.found.st_mode))
        fail(EISDIR);
    if (record->kind == 'f')
        store(&place, record->mode & 0777, record->size, &record->modified_ns);
    else if (record->kind == 'l')
        extract_link(&place, link);
    else
        fail(USAGE);
    close(place.directory);
}

static void run_extract(const char *path) {
    int base = make_directories(root, below_root(path));
    if (base < 0)
        fail(errno);
    for (;;) {
        struct record record;
        take(&record, sizeof record);
        if (record.kind == 'e')
            break;
        extract_record(base, &record);
    }
    struct record end = {.kind = 'e'};
    put(&end, sizeof end);
}

static void run(int argc, char **argv) {
    const char *operation = argv[2], *path = argv[3];
    if (!strcmp(operation, "read") && argc == 6)
        run_read(path, number(argv[4]), number(argv[5]));
    else if (!strcmp(operation, "write") && argc == 6)
        run_write(path, argv[4], number(argv[5]));
    else if (!strcmp(operation, "list") && argc == 7)
        run_walk(&(struct walk){.depth = number(argv[4]), .entries_left = number(argv[5]), .hidden = number(argv[6])}, path);
    else if (!strcmp(operation, "archive") && argc == 6)
        run_walk(&(struct walk){.archive = true, .hidden = true, .depth = UINT64_MAX, .bytes_left = number(argv[4]),
                                .entries_left = number(argv[5])}, path);
    else if (!strcmp(operation, "extract") && argc == 4)
        run_extract(path);
    else
        fail(USAGE);
}

int main(int argc, char **argv) {
    prctl(PR_SET_DUMPABLE, 0); /* the slot's other processes have our uid: no ptrace, no /proc/PID/mem */
    if (argc < 4 || argv[1][0] != '/')
        fail(USAGE);
    umask(022);
    root_name = argv[1];
    root = open(root_name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        fail(errno);
    run(argc, argv);
    flush();
    return 0;
}
