/* slotlaunch: what a slot's first process does between fork and exec, without forking Python.
 *
 *   slotlaunch [-j FILE]... [-l RESOURCE VALUE]... [-o SCORE] [-u UID GID] -- PROGRAM ARG...
 *
 * -j FILE   join a cgroup: write "0" to its tasks or cgroup.procs file
 * -l        lower this rlimit (RESOURCE is its number), soft and hard, to at most VALUE
 * -o SCORE  when memory runs out, prefer what starts here as the victim (oom_score_adj)
 * -u        give up all groups, then become UID and GID
 *
 * It does these in the order given. Then it gives up every capability and every way to get one back, leaves the session
 * keyring of whoever started the supervisor, and executes PROGRAM with an empty environment. The supervisor starts it
 * with posix_spawn (vfork), which costs the same whatever the supervisor's size; forking the supervisor itself costs
 * 2-4 ms more per slot. Static, so that it starts fast. It trusts its arguments: they come from the supervisor alone.
 * Whatever fails is told on stderr, with exit code 127.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/keyctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Noreturn void fail(const char *what, const char *which) {
    dprintf(2, "slotlaunch: %s %s: %s\n", what, which, strerror(errno));
    _exit(127);
}

static unsigned long number(const char *text) {
    char *end = NULL;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0') {
        errno = EINVAL;
        fail("number", text);
    }
    return value;
}

static void put(const char *what, const char *file, const char *text) {
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        fail(what, file);
    close(fd);
}

static void lower_limit(const char *resource, const char *value) {
    int which = (int)number(resource);
    rlim_t wanted = number(value);
    struct rlimit limit;
    if (getrlimit((__rlimit_resource_t)which, &limit) < 0)
        fail("getrlimit", resource);
    if (limit.rlim_max == RLIM_INFINITY || limit.rlim_max > wanted)
        limit.rlim_max = wanted;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit((__rlimit_resource_t)which, &limit) < 0)
        fail("setrlimit", resource);
}

static void become(const char *uid, const char *gid) {
    uid_t user = (uid_t)number(uid);
    gid_t group = (gid_t)number(gid);
    if (setgroups(0, NULL) < 0 || setresgid(group, group, group) < 0 || setresuid(user, user, user) < 0)
        fail("become", uid);
}

static void drop_privileges(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &header, none) < 0)
        fail("drop", "capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1L, 0L, 0L, 0L) < 0)
        fail("set", "no_new_privs");
}

/* For a new one, empty and nameless: a slot must not have the keys of a login, nor those of another slot. Where the
 * container's seccomp profile or the kernel has no keys, there is nothing to leave. */
static void leave_keyring(void) {
    if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != EPERM && errno != ENOSYS)
        fail("leave", "the session keyring");
}

/* Does what one option says. Returns how many arguments it took. */
static int take_option(char **arguments, int left) {
    const char *option = arguments[0];
    if (strcmp(option, "-j") == 0 && left > 1) {
        put("join", arguments[1], "0");
        return 2;
    }
    if (strcmp(option, "-o") == 0 && left > 1) {
        put("raise", "/proc/self/oom_score_adj", arguments[1]);
        return 2;
    }
    if (strcmp(option, "-l") == 0 && left > 2) {
        lower_limit(arguments[1], arguments[2]);
        return 3;
    }
    if (strcmp(option, "-u") == 0 && left > 2) {
        become(arguments[1], arguments[2]);
        return 3;
    }
    errno = EINVAL;
    fail("option", option);
}

int main(int argc, char **argv) {
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
