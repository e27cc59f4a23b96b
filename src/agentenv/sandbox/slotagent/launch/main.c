/* slotlaunch: what a slot's first process does between fork and exec, without forking Python.
 *
 *   slotlaunch [-j FILE]... [-l RESOURCE VALUE]... [-o SCORE] [-u UID GID | -n UID GID UNUSED] -- PROGRAM ARG...
 *
 * -j FILE   join a cgroup: write "0" to its tasks or cgroup.procs file
 * -l        lower this rlimit (RESOURCE is its number), soft and hard, to at most VALUE
 * -o SCORE  when memory runs out, prefer what starts here as the victim (oom_score_adj)
 * -u        give up all groups, then become UID and GID
 * -n        the same, and make the slot's user namespace for bwrap while we have the right to, on descriptor 5: UID is
 *           itself in it, and UNUSED, an id that no process has, is 0 (/dev/pts cannot be mounted without one). No other
 *           can be made below it. Without -n, bwrap makes its own
 *
 * It does these in the order given. Then it gives up every capability and every way to get one back, leaves the session
 * keyring of the supervisor's starter, and executes PROGRAM with an empty environment. The supervisor starts it
 * with posix_spawn (vfork), which costs the same whatever the supervisor's size; forking the supervisor itself costs
 * 2-4 ms more per slot. Static, so that it starts fast. It trusts its arguments: they come from the supervisor alone.
 * Failures are printed to stderr, with exit code 127.
 */
#define _GNU_SOURCE
#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NAMESPACE = 5 };

static void drop_privileges(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &header, none) < 0)
        fail("drop", "capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1L, 0L, 0L, 0L) < 0)
        fail("set", "no_new_privs");
}

/* The process that makes the namespace, and stays in it until `held` is closed everywhere. */
static _Noreturn void make_namespace(int made, int held) {
    char byte = 0;
    if (unshare(CLONE_NEWUSER) < 0)
        fail("make", "a user namespace");
    prctl(PR_SET_DUMPABLE, 1L); /* or our files in /proc belong to root, and the launcher cannot open them */
    put("forbid namespaces in", "/proc/sys/user/max_user_namespaces", "0");
    _exit(write(made, "m", 1) == 1 && read(held, &byte, 1) == 0 ? 0 : 127);
}

static void write_map(pid_t pid, const char *name, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    put("write", path, text);
}

/* A map of several ids is written from outside, by who has the right to each. */
static void write_maps(pid_t pid, const char *uid, const char *gid, const char *unused) {
    char users[96], groups[96];
    snprintf(users, sizeof users, "%lu %lu 1\n0 %lu 1\n", number(uid), number(uid), number(unused));
    snprintf(groups, sizeof groups, "%lu %lu 1\n0 %lu 1\n", number(gid), number(gid), number(unused));
    write_map(pid, "setgroups", "deny");
    write_map(pid, "uid_map", users);
    write_map(pid, "gid_map", groups);
}

/* The user namespace of this process, as descriptor NAMESPACE. */
static void hold_namespace(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int found = open(path, O_RDONLY | O_CLOEXEC);
    if (found < 0 || dup2(found, NAMESPACE) < 0)
        fail("hold", path);
    close(found);
}

static void become_with_namespace(const char *uid, const char *gid, const char *unused) {
    int made[2], held[2], status = 0, spare;
    char byte = 0;
    while ((spare = open("/dev/null", O_RDONLY | O_CLOEXEC)) < NAMESPACE) /* what is opened below lies above it */
        if (spare < 0)
            fail("open", "/dev/null");
    if (pipe2(made, O_CLOEXEC) < 0 || pipe2(held, O_CLOEXEC) < 0)
        fail("make", "pipes");
    become_maker(uid, gid, 1U << CAP_SETUID | 1U << CAP_SETGID);
    pid_t child = fork();
    if (child < 0)
        fail("fork", "for a namespace");
    if (child == 0) {
        close(held[1]);
        make_namespace(made[1], held[0]);
    }
    close(made[1]);
    close(held[0]);
    if (read(made[0], &byte, 1) != 1)
        _exit(127); /* the child's message says why */
    hold_namespace(child);
    write_maps(child, uid, gid, unused);
    close(made[0]);
    close(held[1]);
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("make", "a user namespace");
}

/* Applies one option. Returns how many arguments it took. */
static int take_option(char **arguments, int left) {
    int taken = take_common_option(arguments, left);
    if (taken)
        return taken;
    const char *option = arguments[0];
    if (strcmp(option, "-u") == 0 && left > 2) {
        become(arguments[1], arguments[2]);
        return 3;
    }
    if (strcmp(option, "-n") == 0 && left > 3) {
        become_with_namespace(arguments[1], arguments[2], arguments[3]);
        return 4;
    }
    errno = EINVAL;
    fail("option", option);
}

int main(int argc, char **argv) {
    call_program("slotlaunch");
    int at = 1;
    while (at < argc && strcmp(argv[at], "--") != 0)
        at += take_option(argv + at, argc - at);
    if (at + 1 >= argc) {
        errno = EINVAL;
        fail("nothing to", "start");
    }
    drop_privileges();
    leave_keyring();
    char *nothing[] = {NULL};
    execve(argv[at + 1], argv + at + 1, nothing);
    fail("start", argv[at + 1]);
}
