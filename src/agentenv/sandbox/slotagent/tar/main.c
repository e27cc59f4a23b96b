/* slottar: tars of what is in an image slot, and into it.
 *
 *   slottar layer UID DIRECTORY
 *     becomes UID and joins the user namespace on descriptor 5, as its root, so that owners are those that the slot sees.
 *     DIRECTORY is the root of a writable layer of overlayfs (mounted with userxattr), which is written to standard
 *     output as a layer of an image: see tree.h. Outside of a slot, for the supervisor.
 *
 *   slottar pack PATH
 *     writes a directory, or a single file, to standard output.
 *
 *   slottar unpack DIRECTORY UID GID MODE
 *     unpacks a tar from standard input: see unpack.h.
 *
 * Modes, owners, times in nanoseconds, hard links and extended attributes are kept. Sockets, and the attributes of
 * overlayfs, are left out.
 */
#define _GNU_SOURCE
#include "steps.h"
#include "tree.h"
#include "unpack.h"
#include "write.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { USER_NAMESPACE = 5 };

static int open_path(const char *path, int flags) {
    int fd = open(path, flags | O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno != ENOTDIR)
        fail("open", path);
    return fd;
}

static void pack(char *path) {
    int directory = open_path(path, O_DIRECTORY);
    if (directory >= 0)
        write_directory_tree(directory, false);
    else {
        char *slash = strrchr(path, '/');
        *slash = 0;
        write_single(open_path(slash == path ? "/" : path, O_DIRECTORY), slash + 1);
    }
    end_archive();
}

int main(int argc, char **argv) {
    call_program("slottar");
    if (argc == 4 && !strcmp(argv[1], "layer")) {
        join_user_namespace(argv[2], USER_NAMESPACE);
        write_directory_tree(open_path(argv[3], O_DIRECTORY), true);
        end_archive();
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
