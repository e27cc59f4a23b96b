/* slotroot: the first processes of an image slot, and the user namespace that it lives in.
 *
 *   slotroot userns UID [nested]
 *
 * becomes UID, makes a user namespace and hands it over: see userns.h.
 *
 *   slotroot [-j FILE]... [-l RESOURCE VALUE]... [-o SCORE] -u UID -k CAPABILITIES -h HOSTNAME -s SHM_BYTES
 *            -p TERMINALS -r PROGRAMS -e ETC [-w] [-a] [-v|-V SOURCE TARGET]... [-b SOURCE TARGET]... [-n] [-f] -- PLACE LOWER[:LOWER...] PROGRAM ARG...
 *
 * -j, -l, -o  as slotlaunch
 * -u          become UID and join the user namespace on descriptor 5, as its root
 * -k          the capabilities that the slot's root has, over its own namespaces: a mask of bits (0x...)
 * -h          the slot's host name
 * -s, -p      the size of /dev/shm, and how many terminals may be open at once
 * -r          the directory that the slot has, read-only, as /run/agentenv
 * -e          a directory: its files hosts, hostname and resolv.conf, if there, replace the image's
 * -w          after -u: join the network namespace on descriptor 6, instead of making one
 * -a          nothing has run in the slot: volumes are taken over as new, and refused where the image has files
 * -v          the directory SOURCE, which other roots of the slot may have too, is at TARGET; -V: read-only
 * -b          the file or directory SOURCE, with what is mounted below it, is at TARGET, read-only
 * -n          programs of the slot may make user namespaces, and mounts in those
 * -f          programs of the slot may have sockets that see every frame of its network interfaces
 *
 * It does what the options say in the order given, makes all other namespaces, sends {"child-pid": N} over descriptor
 * 4, a socket, with a descriptor of the network namespace, and waits for that child, which is process 1 of the slot: it mounts the root (tree.h), gives up all other
 * capabilities, puts the filter of system calls on (guard.h) and executes PROGRAM with descriptor 3. It dies with us.
 *
 * PLACE has the writable layer (`upper` and `work`, of UID), an empty directory `root`, a directory for each LOWER,
 * the upmost first.
 *
 * The root is mounted with the credentials of the slot's own root, so the kernel checks against those whatever is done
 * through it. Static, and no more than this: it is root of the container until it becomes UID. It trusts its
 * arguments: they come from the supervisor alone. Failures are printed to stderr, with exit code 127.
 */
#define _GNU_SOURCE
#include "guard.h"
#include "hand_over.h"
#include "steps.h"
#include "tree.h"
#include "userns.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { AGENT = 3, REPORT = 4, USER_NAMESPACE = 5, NETWORK = 6 };

struct wanted {
    struct root root;
    uint64_t capabilities;
    bool packets;
    bool joins_network;
};

/* Applies one option. Returns how many arguments it took. */
static int take_option(struct wanted *wanted, char **arguments, int left) {
    int taken = take_common_option(arguments, left);
    if (taken)
        return taken;
    const char *option = arguments[0];
    if (!strcmp(option, "-n")) {
        wanted->root.nested = true;
        return 1;
    }
    if (!strcmp(option, "-f")) {
        wanted->packets = true;
        return 1;
    }
    if (!strcmp(option, "-w")) {
        if (setns(NETWORK, CLONE_NEWNET) < 0)
            fail("join", "the network namespace");
        wanted->joins_network = true;
        return 1;
    }
    if (!strcmp(option, "-a")) {
        wanted->root.fresh = true;
        return 1;
    }
    bool kept = !strcmp(option, "-V");
    if ((kept || !strcmp(option, "-v")) && left > 2 && wanted->root.volume_count < MAX_VOLUMES) {
        wanted->root.volumes[wanted->root.volume_count++] = (struct volume){arguments[1], arguments[2], kept};
        return 3;
    }
    if (!strcmp(option, "-b") && left > 2 && wanted->root.bind_count < MAX_BINDS) {
        wanted->root.binds[wanted->root.bind_count++] = (struct bind){arguments[1], arguments[2]};
        return 3;
    }
    if (option[0] != '-' || !option[1] || option[2] || left < 2)
        goto unknown;
    switch (option[1]) {
    case 'u':
        join_user_namespace(arguments[1], USER_NAMESPACE);
        return 2;
    case 'k':
        wanted->capabilities = number(arguments[1]);
        return 2;
    case 'h':
        wanted->root.hostname = arguments[1];
        return 2;
    case 'r':
        wanted->root.programs = arguments[1];
        return 2;
    case 'e':
        wanted->root.etc = arguments[1];
        return 2;
    case 's':
        wanted->root.shm_bytes = arguments[1];
        return 2;
    case 'p':
        wanted->root.terminals = arguments[1];
        return 2;
    default:
        break;
    }
unknown:
    errno = EINVAL;
    fail("option", option);
}

/* ---- the parent ---- */

/* In the namespaces that only children enter or that do not matter to us. Ends when the child has ended, as it did. */
static _Noreturn void wait_for(pid_t child, int network) {
    int status;
    char report[64];
    snprintf(report, sizeof report, "{\"child-pid\": %d}\n", child);
    hand_over(REPORT, report, network);
    syscall(SYS_close_range, 3U, ~0U, 0U);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

/* ---- process 1 of the slot ---- */

static void bring_up_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0)
        fail("bring up", "the loopback interface");
    close(fd);
}

/* Gives up all capabilities but these, also as what an exec could give. The filter comes between: it needs
 * CAP_SYS_ADMIN where programs may gain privileges (setuid), which no_new_privs would forbid. */
static void restrict_to(uint64_t kept, const struct guard *guard) {
    for (unsigned long bit = 0; prctl(PR_CAPBSET_READ, bit) >= 0; bit++)
        if (!(kept >> bit & 1) && prctl(PR_CAPBSET_DROP, bit) < 0)
            fail("drop", "a capability");
    if (!guard_slot(getpid(), guard))
        fail("set", "the filter of system calls");
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    uint32_t low = (uint32_t)kept, high = (uint32_t)(kept >> 32);
    struct __user_cap_data_struct sets[2] = {{low, low, 0}, {high, high, 0}};
    if (syscall(SYS_capset, &header, sets) < 0)
        fail("drop", "capabilities");
}

static void become_init(const struct wanted *wanted) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || setsid() < 0)
        fail("set", "the parent-death signal");
    enter_root(&wanted->root);
    bring_up_loopback();
    const struct guard guard = {.may_gain = true, .nested = wanted->root.nested, .packets = wanted->packets,
                                .net_admin = wanted->capabilities >> CAP_NET_ADMIN & 1};
    restrict_to(wanted->capabilities, &guard);
    syscall(SYS_close_range, (unsigned)AGENT + 1, ~0U, 0U);
}

int main(int argc, char **argv) {
    call_program("slotroot");
    if (argc > 2 && !strcmp(argv[1], "userns"))
        make_user_namespace(argv[2], argc > 3 && !strcmp(argv[3], "nested"));
    struct wanted wanted = {0};
    int at = 1;
    while (at < argc && strcmp(argv[at], "--") != 0)
        at += take_option(&wanted, argv + at, argc - at);
    const struct root *root = &wanted.root;
    if (at + 3 >= argc || !root->hostname || !root->shm_bytes || !root->terminals || !root->programs || !root->etc) {
        errno = EINVAL;
        fail("start", "with these arguments");
    }
    wanted.root.place = argv[at + 1];
    wanted.root.lower = argv[at + 2];
    leave_keyring();
    if (unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP |
                (wanted.joins_network ? 0 : CLONE_NEWNET)) < 0)
        fail("make", "namespaces");
    /* Both processes leave the old root when the child pivots, if they are at it and not below: a working directory there
     * would keep a copy of every mount of the container. */
    if (chdir("/") < 0)
        fail("enter", "/");
    /* Before there is a child, which takes /proc from us when it pivots: we are no process of its /proc. */
    int network = open_namespace("net");
    pid_t child = fork();
    if (child < 0)
        fail("fork", "process 1");
    if (child > 0)
        wait_for(child, network);
    close(network);
    become_init(&wanted);
    char *nothing[] = {NULL};
    execve(argv[at + 3], argv + at + 3, nothing);
    fail("start", argv[at + 3]);
}
