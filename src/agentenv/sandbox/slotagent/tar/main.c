/* slottar: tars of what is in an image slot, and into it.
 *
 *   slottar layer UID DIRECTORY
 *     becomes UID and joins the user namespace on descriptor 5, as its root, so that owners are those that the slot sees.
 *     DIRECTORY is the root of a writable layer of overlayfs (mounted with userxattr), which is written to standard
 *     output as a layer of an image: see tree.h. Outside of a slot, for the supervisor. Files with names that such
 *     a layer cannot have are left out, so they are checked before:
 *
 *   slottar reserved DIRECTORY ABOVE...
 *     prints the path of one that is seen through the layers above it (the lowest first), if there is one: see layer.h.
 *
 *   slottar pack PATH
 *     writes a directory, or a single file, to standard output.
 *
 *   slottar unpack DIRECTORY UID GID MODE
 *     unpacks a tar from standard input: see unpack.h.
 *
 *   slottar pack-whole DIRECTORY
 *   slottar unpack-whole DIRECTORY
 *     copy the workspace of a plain slot, outside of it, for the supervisor: every file is the caller's own, whatever its
 *     mode, and another user's after it was unpacked by that. Each becomes the root of a user namespace that has only
 *     the caller's own user and group, as 0.
 *
 *   slottar [-j FILE]... [-o SCORE] copy UID SOURCE TARGET
 *     becomes UID and joins the user namespace on descriptor 5, as its root, and copies what is in the directory SOURCE,
 *     and that itself, to TARGET, of which nothing may be in use. Outside of a slot, for the supervisor.
 *
 * Modes, owners, times in nanoseconds, hard links and extended attributes are kept; by pack-whole and copy also holes, the times of
 * access, and the attributes of the directory itself. Sockets, and (but by these) the attributes of overlayfs, are
 * left out.
 */
#define _GNU_SOURCE
#include "layer.h"
#include "steps.h"
#include "tree.h"
#include "unpack.h"
#include "write.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USER_NAMESPACE = 5 };

static void own_user_namespace(void) {
    char uids[64], gids[64];
    snprintf(uids, sizeof uids, "0 %u 1", getuid());
    snprintf(gids, sizeof gids, "0 %u 1", getgid());
    if (unshare(CLONE_NEWUSER) < 0)
        fail("make", "a user namespace");
    put("deny", "/proc/self/setgroups", "deny");
    put("map", "/proc/self/uid_map", uids);
    put("map", "/proc/self/gid_map", gids);
}

static int open_directory(const char *path, enum purpose purpose) {
    int fd = open_tree_root(path, purpose);
    if (fd < 0)
        fail("open", path);
    return fd;
}

static void pack(char *path) {
    int directory = open_tree_root(path, FILES);
    if (directory >= 0)
        write_directory_tree(directory, FILES);
    else if (errno != ENOTDIR)
        fail("open", path);
    else {
        char *slash = strrchr(path, '/');
        *slash = 0;
        write_single(open_directory(slash == path ? "/" : path, FILES), slash + 1);
    }
    end_archive();
}

static void pack_as(const char *path, enum purpose purpose) {
    write_directory_tree(open_directory(path, purpose), purpose);
    end_archive();
}

/* A tar, from a child to us. */
static void copy(const char *uid, const char *source, const char *target) {
    int ends[2], status = 0;
    join_user_namespace(uid, USER_NAMESPACE);
    if (pipe2(ends, O_CLOEXEC) < 0)
        fail("make", "a pipe");
    pid_t child = fork();
    if (child < 0)
        fail("fork", "to read");
    if (child == 0) {
        if (dup2(ends[1], STDOUT_FILENO) < 0)
            fail("write to", "the pipe");
        pack_as(source, WHOLE);
        _exit(0);
    }
    if (dup2(ends[0], STDIN_FILENO) < 0)
        fail("read from", "the pipe");
    close(ends[0]);
    close(ends[1]);
    unpack(target, 0, 0, 0755);
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("read", source);
}

int main(int argc, char **argv) {
    call_program("slottar");
    for (int taken; argc > 1 && (taken = take_common_option(argv + 1, argc - 1)) > 0; argv += taken)
        argc -= taken;
    if (argc == 4 && !strcmp(argv[1], "layer")) {
        join_user_namespace(argv[2], USER_NAMESPACE);
        pack_as(argv[3], LAYER);
    } else if (argc == 5 && !strcmp(argv[1], "copy"))
        copy(argv[2], argv[3], argv[4]);
    else if (argc >= 3 && !strcmp(argv[1], "reserved"))
        print_reserved(argv[2], argv + 3, argc - 3);
    else if (argc == 3 && !strcmp(argv[1], "pack-whole")) {
        own_user_namespace();
        pack_as(argv[2], WHOLE);
    } else if (argc == 3 && !strcmp(argv[1], "unpack-whole")) {
        own_user_namespace();
        unpack(argv[2], 0, 0, 0700);
    } else if (argc == 3 && !strcmp(argv[1], "pack") && argv[2][0] == '/')
        pack(argv[2]);
    else if (argc == 6 && !strcmp(argv[1], "unpack") && argv[2][0] == '/')
        unpack(argv[2], (uid_t)number(argv[3]), (gid_t)number(argv[4]), (mode_t)number(argv[5]));
    else {
        errno = EINVAL;
        fail("start", "with these arguments");
    }
    return 0;
}
