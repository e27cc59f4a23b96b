/* See tree.h.
 *
 * The image is a stranger's: any name in it may be a symbolic link to anywhere. So whatever comes from outside (file
 * systems, devices, our own programs) is opened as a descriptor while we still see the old root, and mounted once that
 * is gone: a name can then lead nowhere but into the slot.
 */
#define _GNU_SOURCE
#include "tree.h"

#include "steps.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* From linux/mount.h, which older headers lack. */
enum { CONFIG_FLAG = 0, CONFIG_STRING = 1, CONFIG_CREATE = 6, ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4 };
enum { ATTR_NOEXEC = 8, CLONE_TREE = 1, MOVE_EMPTY_PATH = 4, SET_ATTR_SYS = 442, OPTIONS_BYTES = 4096, PATH_BYTES = 4096 };
enum { NO_SYMLINKS = 4 };
enum { NO_EXEC_OR_DEVICES = ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC };

struct attributes {
    uint64_t set, clear, propagation, userns;
};

/* struct open_how of linux/openat2.h. */
struct opening {
    uint64_t flags, mode, resolve;
};

/* ---- from outside, as descriptors ---- */

/* A new file system. `options` are pairs of name and value, ended by NULL. */
static int make_file_system(const char *kind, const char *const *options, unsigned attributes) {
    int context = (int)syscall(SYS_fsopen, kind, 1U);
    if (context < 0)
        fail("open a file system", kind);
    for (; *options; options += 2)
        if (syscall(SYS_fsconfig, context, (unsigned)CONFIG_STRING, options[0], options[1], 0) < 0)
            fail("set", options[0]);
    if (syscall(SYS_fsconfig, context, (unsigned)CONFIG_CREATE, NULL, NULL, 0) < 0)
        fail("create a file system", kind);
    int made = (int)syscall(SYS_fsmount, context, 1U, attributes);
    if (made < 0)
        fail("make a mount", kind);
    close(context);
    return made;
}

/* A copy of the mount at `path`, with these attributes as well; `below`: AT_RECURSIVE, with the mounts below it, or 0. */
static int copy_mounts(const char *path, uint64_t attributes, unsigned below) {
    int made = (int)syscall(SYS_open_tree, AT_FDCWD, path, (unsigned)(CLONE_TREE | O_CLOEXEC) | below);
    if (made < 0)
        fail("open", path);
    struct attributes wanted = {.set = attributes};
    if (attributes && syscall(SET_ATTR_SYS, made, "", AT_EMPTY_PATH | below, &wanted, sizeof wanted) < 0)
        fail("restrict", path);
    return made;
}

static int copy_mount(const char *path, uint64_t attributes) { return copy_mounts(path, attributes, 0); }

enum { DEVICES = 6, FILES = 3 };
static const char *const DEVICE_NAMES[DEVICES] = {"null", "zero", "full", "random", "urandom", "tty"};
static const char *const FILE_NAMES[FILES] = {"hosts", "hostname", "resolv.conf"};

struct outside {
    int proc, sys, devices, terminals, shared, queues, programs, nodes[DEVICES], files[FILES], volumes[MAX_VOLUMES];
    int binds[MAX_BINDS];
};

static void open_outside(const struct root *root, struct outside *from) {
    static const char *const none[] = {NULL};
    const char *const devices[] = {"mode", "755", "size", "64k", "nr_inodes", "64", NULL};
    const char *const shared[] = {"mode", "1777", "size", root->shm_bytes, NULL};
    const char *const terminals[] = {"newinstance", "", "ptmxmode", "0666", "mode", "0620", "gid", "5",
                                     "max", root->terminals, NULL};
    /* Read-only: no process may lower an oom_score_adj. A nested user namespace has its maps written through it. */
    from->proc = make_file_system("proc", none, NO_EXEC_OR_DEVICES | (root->nested ? 0 : ATTR_RDONLY));
    from->sys = make_file_system("sysfs", none, NO_EXEC_OR_DEVICES | ATTR_RDONLY);
    from->devices = make_file_system("tmpfs", devices, ATTR_NOSUID | ATTR_NOEXEC);
    from->shared = make_file_system("tmpfs", shared, ATTR_NOSUID | ATTR_NODEV);
    from->terminals = make_file_system("devpts", terminals + 2, ATTR_NOSUID | ATTR_NOEXEC);
    from->queues = make_file_system("mqueue", none, NO_EXEC_OR_DEVICES);
    from->programs = copy_mount(root->programs, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
    for (int i = 0; i < DEVICES; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/%s", DEVICE_NAMES[i]);
        from->nodes[i] = copy_mount(path, 0);
    }
    for (int i = 0; i < root->volume_count; i++)
        from->volumes[i] = copy_mount(root->volumes[i].source, root->volumes[i].read_only ? ATTR_RDONLY : 0);
    for (int i = 0; i < root->bind_count; i++)
        from->binds[i] = copy_mounts(root->binds[i].source, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, AT_RECURSIVE);
    int etc = open(root->etc, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (etc < 0)
        fail("open", root->etc);
    for (int i = 0; i < FILES; i++) {
        from->files[i] = openat(etc, FILE_NAMES[i], O_RDONLY | O_CLOEXEC);
        if (from->files[i] < 0 && errno != ENOENT)
            fail("open", FILE_NAMES[i]);
    }
    close(etc);
}

/* ---- the root itself ---- */

/* By the mount call, because its options are then shown as they were given: names relative to PLACE. */
static void mount_root(const struct root *root) {
    char options[OPTIONS_BYTES];
    int bytes = snprintf(options, sizeof options, "lowerdir=%s,upperdir=upper,workdir=work,userxattr", root->lower);
    errno = ENAMETOOLONG;
    if (bytes < 0 || (size_t)bytes >= sizeof options || mount("overlay", "root", "overlay", 0, options) < 0)
        fail("mount", "the root");
    if (chdir("root") < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        fail("enter", "the root");
}

static void mount_at(int made, const char *path) {
    if (syscall(SYS_move_mount, made, "", AT_FDCWD, path, (unsigned)MOVE_EMPTY_PATH) < 0)
        fail("mount", path);
    close(made);
}

/* What leads to a directory is used as it is; anything else that an image has there is replaced. */
static void make_directory(const char *path, mode_t mode) {
    struct stat found;
    if (stat(path, &found) == 0 && S_ISDIR(found.st_mode))
        return;
    if (unlink(path) < 0 && errno != ENOENT)
        fail("replace", path);
    if (mkdir(path, mode) < 0)
        fail("make", path);
}

/* For a mount of ours: a link to another directory is replaced as well, so that nothing else is covered, and the mount
 * is where it is said to be (supervisor/attest.py). */
static void make_mount_point(const char *path) {
    struct stat found;
    if (lstat(path, &found) == 0 && !S_ISDIR(found.st_mode) && unlink(path) < 0)
        fail("replace", path);
    make_directory(path, 0755);
}

/* Makes a directory and those above it, as make_directory. */
static void make_directories(const char *path) {
    char part[PATH_BYTES];
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        make_directory(part, 0755);
    }
    make_mount_point(path);
}

static bool is_empty(int directory) {
    char entries[1024];
    bool empty = true;
    for (long bytes; (bytes = syscall(SYS_getdents64, directory, entries, sizeof entries)) > 0;)
        for (long at = 0; at < bytes;) {
            const struct dirent64 *entry = (const void *)(entries + at);
            empty = empty && (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."));
            at += entry->d_reclen;
        }
    return empty;
}

/* An engine copies what the image has there into a new volume. That is not done here: only the owner and the mode of the
 * directory are taken over, and files in it are refused, since programs would miss them. */
static void take_over(int volume, const struct volume *named) {
    struct stat found;
    int covered = open(named->target, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    int top = openat(volume, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (covered < 0 || top < 0 || fstat(covered, &found) < 0)
        fail("open the place of a volume", named->target);
    errno = ENOTEMPTY;
    if (!is_empty(covered))
        fail("mount a volume where the image has files", named->target);
    if (!named->read_only && is_empty(top) &&
        (fchown(top, found.st_uid, found.st_gid) < 0 || fchmod(top, found.st_mode & 07777) < 0))
        fail("set the owner of a volume", named->target);
    close(covered);
    close(top);
}

static void mount_volumes(const struct root *root, const struct outside *from) {
    for (int i = 0; i < root->volume_count; i++) {
        make_directories(root->volumes[i].target);
        if (root->fresh)
            take_over(from->volumes[i], &root->volumes[i]);
        mount_at(from->volumes[i], root->volumes[i].target);
    }
}

static void make_file(const char *path) {
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        fail("make", path);
    close(fd);
}

/* Where a bind is to be: what is missing is made, and what the image has there is covered, as an engine does. A link of
 * the image is not followed: the mount would not be where it is said to be. Nothing of the image is replaced. */
static void make_bind_point(const char *path, bool is_directory) {
    char part[PATH_BYTES];
    struct stat found;
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        if (mkdir(part, 0755) < 0 && errno != EEXIST)
            fail("make the place of a bind", part);
    }
    if (lstat(path, &found) < 0) {
        int made = is_directory ? mkdir(path, 0755) : mknod(path, S_IFREG | 0644, 0);
        if (made < 0)
            fail("make the place of a bind", path);
    }
    struct opening how = {.flags = O_PATH | O_CLOEXEC, .resolve = NO_SYMLINKS};
    int at = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (at < 0 || fstat(at, &found) < 0)
        fail("make the place of a bind", path);
    errno = is_directory ? ENOTDIR : EISDIR;
    if (S_ISDIR(found.st_mode) != is_directory)
        fail("make the place of a bind", path);
    close(at);
}

static void mount_binds(const struct root *root, const struct outside *from) {
    for (int i = 0; i < root->bind_count; i++) {
        struct stat shown;
        if (fstat(from->binds[i], &shown) < 0)
            fail("see", root->binds[i].source);
        make_bind_point(root->binds[i].target, S_ISDIR(shown.st_mode));
        mount_at(from->binds[i], root->binds[i].target);
    }
}

static bool is_bound(const struct root *root, const char *path) {
    for (int i = 0; i < root->bind_count; i++)
        if (!strcmp(root->binds[i].target, path))
            return true;
    return false;
}

static void mount_devices(const struct outside *from) {
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"}, {"/proc/self/fd/0", "/dev/stdin"},
                                           {"/proc/self/fd/1", "/dev/stdout"}, {"/proc/self/fd/2", "/dev/stderr"},
                                           {"pts/ptmx", "/dev/ptmx"}};
    mount_at(from->devices, "/dev");
    for (int i = 0; i < DEVICES; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/%s", DEVICE_NAMES[i]);
        make_file(path);
        mount_at(from->nodes[i], path);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]) < 0)
            fail("make", links[i][1]);
    make_directory("/dev/pts", 0755);
    mount_at(from->terminals, "/dev/pts");
    make_directory("/dev/shm", 01777);
    mount_at(from->shared, "/dev/shm");
    make_directory("/dev/mqueue", 01777);
    mount_at(from->queues, "/dev/mqueue");
}

/* What describes the machine, or sets something of it: what Docker hides (moby, oci/defaults.go), and disks, whose names
 * are paths of the machine and whose counters tell what neighbours write. The list is that of supervisor/attest.py, which
 * looks at every slot. What is not there on this kernel needs no cover. */
static void cover_machine(void) {
    static const char *const read_only[] = {"/proc/bus", "/proc/driver", "/proc/dynamic_debug",
                                            "/proc/fs", "/proc/irq", "/proc/mtrr", "/proc/pressure", "/proc/sys",
                                            "/proc/sysrq-trigger"};
    static const char *const files[] = {"/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
                                        "/proc/timer_stats", "/proc/sched_debug", "/proc/interrupts",
                                        "/proc/diskstats", "/proc/partitions", "/proc/config.gz", "/proc/iomem",
                                        "/proc/ioports", "/sys/kernel/notes"};
    static const char *const directories[] = {"/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/firmware",
                                              "/sys/block", "/sys/class/bdi", "/sys/class/block", "/sys/dev/block",
                                              "/sys/fs", "/sys/devices/virtual/bdi", "/sys/devices/virtual/block",
                                              "/sys/devices/virtual/powercap"};
    for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++) {
        if (mount(read_only[i], read_only[i], NULL, MS_BIND | MS_REC, NULL) < 0 && errno != ENOENT)
            fail("cover", read_only[i]);
        unsigned long flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
        if (mount("none", read_only[i], NULL, flags, NULL) < 0 && errno != ENOENT)
            fail("cover", read_only[i]);
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (mount("/dev/null", files[i], NULL, MS_BIND, NULL) < 0 && errno != ENOENT)
            fail("cover", files[i]);
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        if (mount("none", directories[i], "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0") < 0 &&
            errno != ENOENT)
            fail("cover", directories[i]);
}

/* As ordinary files, so that programs can replace and rename them. */
static void write_files(const struct root *root, const struct outside *from) {
    for (int i = 0; i < FILES; i++) {
        char path[32];
        struct stat found;
        if (from->files[i] < 0)
            continue;
        snprintf(path, sizeof path, "/etc/%s", FILE_NAMES[i]);
        if (is_bound(root, path))
            continue;
        make_directory("/etc", 0755);
        unlink(path); /* an image often has a link there */
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
        if (fd < 0 || fstat(from->files[i], &found) < 0 ||
            sendfile(fd, from->files[i], NULL, (size_t)found.st_size) != found.st_size)
            fail("write", path);
        close(fd);
        close(from->files[i]);
    }
}

void enter_root(const struct root *root) {
    struct outside from;
    umask(0);
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 || chdir(root->place) < 0)
        fail("enter", root->place);
    open_outside(root, &from);
    mount_root(root);
    mount_volumes(root, &from);
    mount_binds(root, &from);
    make_mount_point("/proc");
    mount_at(from.proc, "/proc");
    make_mount_point("/sys");
    mount_at(from.sys, "/sys");
    make_mount_point("/dev");
    mount_devices(&from);
    cover_machine();
    make_directory("/tmp", 01777);
    make_mount_point("/run");
    make_mount_point("/run/agentenv");
    mount_at(from.programs, "/run/agentenv");
    write_files(root, &from);
    umask(022);
    if (sethostname(root->hostname, strlen(root->hostname)) < 0)
        fail("set", "the host name");
}
