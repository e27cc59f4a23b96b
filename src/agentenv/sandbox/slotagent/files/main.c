/* slotfiles: one file operation inside a slot, under the slot's uid, beneath its workspace.
 *
 *   slotfiles ROOT read PATH OFFSET LIMIT
 *   slotfiles ROOT write PATH MODE|- BYTES          content on stdin
 *   slotfiles ROOT list PATH DEPTH LIMIT HIDDEN
 *   slotfiles ROOT archive PATH MAX_BYTES MAX_ENTRIES
 *   slotfiles ROOT extract PATH                     records on stdin
 *   slotfiles ROOT send PATH MAX_ENTRIES            a transfer on stdout
 *   slotfiles ROOT receive PATH                     a transfer on stdin
 *   slotfiles ROOT patch PATH STRIP|- FUZZ BYTES    a unified diff on stdin: all of it or nothing
 *   slotfiles ROOT search PATH FLAGS LIMIT GLOB NEEDLE PATTERN
 *
 * docs/slot-agent.md has the exit codes and the records; sandbox/tools/files.py is the other side.
 * PATH is relative to ROOT, or absolute below it. The kernel keeps every lookup beneath ROOT
 * (openat2, RESOLVE_BENEATH), so symlinks, `..` and races of the slot's processes cannot leave it.
 */
#define _GNU_SOURCE
#include "slotfiles.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { MAX_DEPTH = 512 };

_Static_assert(sizeof(struct record) == 32, "the record is 32 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, unswapped");

const char *root_name;
int root;
enum telling telling;
char failing_path[PATH_BYTES];
void (*undo)(void);

/* A stream that ends says why: who reads it knows nothing of exit codes. */
static void tell(int code) {
    enum telling how = telling;
    telling = TELL_NOTHING; /* writing may fail too */
    uint32_t broken_off[2] = {BROKEN_OFF, (uint32_t)code};
    struct record record = {.kind = 'x', .path_bytes = (uint32_t)strlen(failing_path), .size = (uint64_t)code};
    if (how == TELL_CHUNK) {
        put(broken_off, sizeof broken_off);
    } else {
        put(&record, sizeof record);
        put(failing_path, record.path_bytes);
    }
    flush();
}

_Noreturn void fail(int code) {
    if (undo)
        undo();
    if (telling != TELL_NOTHING)
        tell(code);
    const char *text = code < 128 ? strerror(code) : "refused";
    if (write(2, text, strlen(text)) < 0 || write(2, "\n", 1) < 0) {}
    _exit(code > 0 && code < 128 ? code : code >= OUTSIDE && code <= USAGE ? code : EIO);
}

uint64_t number(const char *text) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end || *text < '0' || *text > '9')
        fail(USAGE);
    return value;
}

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

static void put_record(
    const struct walk *walk, char kind, const struct stat *found, const char *link, size_t link_bytes) {
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
    unsigned char digest[SUM_BYTES];
    struct sum sum;
    sum_begin(&sum);
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
            break;
        if (walk->summed)
            sum_add(&sum, chunk, bytes);
    }
    if (walk->summed) {
        sum_end(&sum, digest);
        put(digest, sizeof digest);
    }
}

void archive_file(struct walk *walk, int fd) {
    struct stat found;
    if (fstat(fd, &found))
        fail(errno);
    if (S_ISREG(found.st_mode)) { /* else it was swapped since it was listed */
        enum telling before = telling;
        put_record(walk, 'f', &found, NULL, 0);
        telling = before ? TELL_CHUNK : before;
        put_content(walk, fd);
        telling = before;
    }
}

static bool wanted(const struct walk *walk, const char *name) {
    return !walk->glob || !fnmatch(walk->glob, strchr(walk->glob, '/') ? walk->path : name, 0);
}

static void visit_file(struct walk *walk, int directory, const char *name) {
    if (!wanted(walk, name))
        return;
    int fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0) {
        walk->file(walk, fd);
        close(fd);
    } else if (walk->tolerant) {
        walk->unreadable += errno != ENOENT;
    } else if (errno != ENOENT) {
        fail(errno);
    }
}

static void walk_directory(struct walk *walk, int fd, uint64_t depth);

static void visit(struct walk *walk, int directory, const char *name, uint64_t depth) {
    struct stat found;
    char link[PATH_BYTES / 2];
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW))
        return; /* gone since it was listed */
    char kind = S_ISREG(found.st_mode) ? 'f' : S_ISDIR(found.st_mode) ? 'd' : S_ISLNK(found.st_mode) ? 'l' : 'o';
    if (walk->file && kind == 'o')
        return;
    if (!walk->entries_left) {
        walk->full = true;
        return;
    }
    walk->entries_left--;
    if (walk->file)
        snprintf(failing_path, sizeof failing_path, "%s", walk->path);
    if (walk->file && kind == 'f') {
        visit_file(walk, directory, name);
        return;
    }
    ssize_t link_bytes = kind == 'l' ? readlinkat(directory, name, link, sizeof link) : 0;
    if (!walk->tolerant)
        put_record(walk, kind, &found, link, link_bytes > 0 ? (size_t)link_bytes : 0);
    if (kind != 'd' || depth >= walk->depth || (walk->skips_git && !strcmp(name, ".git")))
        return;
    if (depth >= MAX_DEPTH)
        fail(ENAMETOOLONG);
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0)
        walk_directory(walk, fd, depth + 1);
    else if (walk->tolerant)
        walk->unreadable += errno != ENOENT;
    else if (walk->file && errno != ENOENT)
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

void run_walk(struct walk *walk, const char *path) {
    path = below_root(path);
    int fd = open_beneath(root, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    struct stat found;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (S_ISDIR(found.st_mode)) {
        if (walk->summed)
            put_record(walk, 'd', &found, NULL, 0);
        walk_directory(walk, fd, 1);
        return;
    }
    if (!walk->file)
        fail(ENOTDIR);
    if (!S_ISREG(found.st_mode))
        fail(NOT_REGULAR);
    const char *slash = strrchr(path, '/');
    if (!walk->summed && !walk->tolerant) /* an archive names it; who sends or searches it knows its name */
        snprintf(walk->path, sizeof walk->path, "%s", slash ? slash + 1 : path);
    walk->file(walk, fd);
    close(fd);
}

static void put_end(const struct walk *walk) {
    if (walk->file && walk->full)
        fail(TOO_LARGE);
    struct record end = {.kind = 'e', .truncated = walk->full};
    put(&end, sizeof end);
}

static void run_tree(struct walk *walk, const char *path) {
    run_walk(walk, path);
    put_end(walk);
}

void run_send(const char *path, uint64_t max_entries) {
    static struct walk walk = {.file = archive_file, .summed = true, .hidden = true, .depth = UINT64_MAX,
                               .bytes_left = UINT64_MAX};
    walk.entries_left = max_entries;
    telling = TELL_RECORD;
    be_patient();
    run_tree(&walk, path);
}

static void run(int argc, char **argv) {
    const char *operation = argv[2], *path = argv[3];
    if (!strcmp(operation, "read") && argc == 6)
        run_read(path, number(argv[4]), number(argv[5]));
    else if (!strcmp(operation, "write") && argc == 6)
        run_write(path, argv[4], number(argv[5]));
    else if (!strcmp(operation, "list") && argc == 7)
        run_tree(&(struct walk){.depth = number(argv[4]), .entries_left = number(argv[5]), .hidden = number(argv[6])},
                 path);
    else if (!strcmp(operation, "archive") && argc == 6)
        run_tree(&(struct walk){.file = archive_file, .hidden = true, .depth = UINT64_MAX,
                                .bytes_left = number(argv[4]), .entries_left = number(argv[5])}, path);
    else if (!strcmp(operation, "extract") && argc == 4)
        run_extract(path);
    else if (!strcmp(operation, "send") && argc == 5)
        run_send(path, number(argv[4]));
    else if (!strcmp(operation, "receive") && argc == 4)
        run_receive(path);
    else if (!strcmp(operation, "patch") && argc == 7)
        run_patch(path, argv[4], number(argv[5]), number(argv[6]));
    else if (!strcmp(operation, "search") && argc == 9)
        run_search(path, argv[4], number(argv[5]), argv[6], argv[7], argv[8]);
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
