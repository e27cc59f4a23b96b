/* slotfiles: one file operation inside a slot, under the slot's uid.
 *
 *   slotfiles ROOT read PATH OFFSET LIMIT
 *   slotfiles ROOT write PATH MODE|- BYTES          content on stdin
 *   slotfiles ROOT list PATH DEPTH LIMIT HIDDEN
 *   slotfiles ROOT archive PATH MAX_BYTES MAX_ENTRIES
 *   slotfiles ROOT extract PATH                     records on stdin
 *   slotfiles ROOT send PATH MAX_ENTRIES            a transfer on stdout
 *   slotfiles ROOT receive PATH                     a transfer on stdin
 *   slotfiles ROOT patch PATH STRIP|- FUZZ BYTES    a unified diff on stdin: all of it or nothing
 *   slotfiles ROOT search PATH RIPGREP FLAGS LIMIT GLOB PATTERN
 *   slotfiles ROOT stat PATH FOLLOW
 *   slotfiles ROOT mkdir PATH PARENTS EXIST_OK
 *   slotfiles ROOT rename PATH TARGET
 *   slotfiles ROOT remove PATH TREE
 *   slotfiles ROOT room PATH
 *
 * docs/slot-agent.md has the exit codes and the records; sandbox/tools/files.py is the other side.
 * PATH is relative to ROOT (the workspace) or absolute. With --beneath before ROOT, nothing leads out of it (see paths.h).
 */
#define _GNU_SOURCE
#include "entries.h"
#include "io.h"
#include "patch.h"
#include "paths.h"
#include "search.h"
#include "store.h"
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static void run_read(const char *path, uint64_t offset, uint64_t limit) {
    /* O_NONBLOCK: else opening a FIFO without a writer would wait for ever. */
    int fd = open_beneath(root(), from_root(path), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    struct stat found;
    if (fd < 0 || fstat(fd, &found))
        fail(errno == ENXIO ? NOT_REGULAR : errno);
    if (!S_ISREG(found.st_mode))
        fail(S_ISDIR(found.st_mode) ? EISDIR : NOT_REGULAR);
    struct record record = {.kind = 'f', .mode = found.st_mode & 07777, .size = (uint64_t)found.st_size};
    put(&record, sizeof record);
    while (limit && offset < INT64_MAX - CHUNK) { /* pread takes no larger offset, and no file is that long */
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
    find_target(from_root(path), &place);
    if (place.exists && !S_ISREG(place.found.st_mode))
        fail(S_ISDIR(place.found.st_mode) ? EISDIR : NOT_REGULAR);
    /* A rename would replace a read-only file without asking; a shell's `>` would not. */
    if (place.exists && faccessat(place.directory, place.name, W_OK, AT_EACCESS))
        fail(errno);
    store(&place, strcmp(mode, "-") ? (int)(number(mode) & 0777) : KEPT_MODE, bytes, NULL);
    struct record record = {.kind = place.exists ? 'f' : 'n', .size = stored_bytes()};
    put(&record, sizeof record);
}

/* Of the file system that a directory is in: all bytes, and those that are used. */
static void run_room(const char *path) {
    int fd = open_beneath(root(), from_root(path), O_RDONLY | O_DIRECTORY);
    struct statvfs found;
    if (fd < 0 || fstatvfs(fd, &found))
        fail(errno);
    uint64_t unit = found.f_frsize;
    uint64_t used = unit * (found.f_blocks - found.f_bfree);
    struct record record = {.kind = 'e', .size = unit * found.f_blocks, .modified_ns = (int64_t)used};
    put(&record, sizeof record);
}

/* `~` for a home that the server does not know: that of the user we run as (slotas has set HOME). */
static const char *at_home(const char *path, char whole[PATH_BYTES]) {
    const char *home = getenv("HOME");
    if (path[0] != '~' || (path[1] && path[1] != '/') || !home || home[0] != '/')
        return path;
    if ((size_t)snprintf(whole, PATH_BYTES, "%s%s", home, path + 1) >= PATH_BYTES)
        fail(ENAMETOOLONG);
    return whole;
}

static void run(int argc, char **argv) {
    static char whole[PATH_BYTES], whole_target[PATH_BYTES];
    const char *operation = argv[2], *path = at_home(argv[3], whole);
    if (!strcmp(operation, "read") && argc == 6)
        run_read(path, number(argv[4]), number(argv[5]));
    else if (!strcmp(operation, "write") && argc == 6)
        run_write(path, argv[4], number(argv[5]));
    else if (!strcmp(operation, "list") && argc == 7)
        run_list(path, number(argv[4]), number(argv[5]), number(argv[6]));
    else if (!strcmp(operation, "archive") && argc == 6)
        run_archive(path, number(argv[4]), number(argv[5]));
    else if (!strcmp(operation, "extract") && argc == 4)
        run_extract(path);
    else if (!strcmp(operation, "send") && argc == 5)
        run_send(path, number(argv[4]));
    else if (!strcmp(operation, "receive") && argc == 4)
        run_receive(path);
    else if (!strcmp(operation, "patch") && argc == 7)
        run_patch(path, argv[4], number(argv[5]), number(argv[6]));
    else if (!strcmp(operation, "search") && argc == 9)
        run_search(path, argv[4], argv[5], number(argv[6]), argv[7], argv[8]);
    else if (!strcmp(operation, "stat") && argc == 5)
        run_stat(path, number(argv[4]));
    else if (!strcmp(operation, "mkdir") && argc == 6)
        run_mkdir(path, number(argv[4]), number(argv[5]));
    else if (!strcmp(operation, "rename") && argc == 5)
        run_rename(path, at_home(argv[4], whole_target));
    else if (!strcmp(operation, "remove") && argc == 5)
        run_remove(path, number(argv[4]));
    else if (!strcmp(operation, "room") && argc == 4)
        run_room(path);
    else
        fail(USAGE);
}

int main(int argc, char **argv) {
    prctl(PR_SET_DUMPABLE, 0); /* the slot's other processes have our uid, but get no ptrace and no /proc/PID/mem */
    bool fence = argc > 1 && !strcmp(argv[1], "--beneath");
    argc -= fence, argv += fence;
    if (argc < 4 || argv[1][0] != '/')
        fail(USAGE);
    umask(022);
    open_root(argv[1], fence);
    run(argc, argv);
    flush();
    return 0;
}
