/* See steps.h. */
#define _GNU_SOURCE
#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *program_name = "";

void call_program(const char *name) {
    program_name = name;
}

_Noreturn void fail(const char *what, const char *which) {
    dprintf(2, "%s: %s %s: %s\n", program_name, what, which, strerror(errno));
    _exit(127);
}

_Noreturn void leave(int exit_code, const char *what, const char *which) {
    dprintf(2, "%s: %s: %s\n", program_name, what, which);
    _exit(exit_code);
}

unsigned long number(const char *text) {
    char *end = NULL;
    errno = 0;
    unsigned long value = strtoul(text, &end, 0);
    if (errno != 0 || end == text || *end != '\0') {
        errno = EINVAL;
        fail("number", text);
    }
    return value;
}

void put(const char *what, const char *file, const char *text) {
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        fail(what, file);
    close(fd);
}

void lower_limit(const char *resource, const char *value) {
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

void become(const char *uid, const char *gid) {
    uid_t user = (uid_t)number(uid);
    gid_t group = (gid_t)number(gid);
    if (setgroups(0, NULL) < 0 || setresgid(group, group, group) < 0 || setresuid(user, user, user) < 0)
        fail("become", uid);
}

static void have_capabilities(uint32_t mask) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct wanted[2] = {{.effective = mask, .permitted = mask}};
    if (syscall(SYS_capset, &header, wanted) < 0)
        fail("keep", "a capability");
}

void become_maker(const char *uid, const char *gid, unsigned others) {
    if (prctl(PR_SET_KEEPCAPS, 1L, 0L, 0L, 0L) < 0)
        fail("keep", "capabilities");
    become(uid, gid);
    have_capabilities(1U << CAP_SYS_ADMIN | others);
}

void join_user_namespace(const char *uid, int namespace) {
    become(uid, uid);
    if (setns(namespace, CLONE_NEWUSER) < 0)
        fail("join", "the user namespace");
    close(namespace);
    become("0", "0");
}

/* A slot must not have the keys of a login, nor those of another slot. Where the container's seccomp profile or the
 * kernel has no keys, there is nothing to leave. */
void leave_keyring(void) {
    if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != EPERM && errno != ENOSYS)
        fail("leave", "the session keyring");
}

int take_common_option(char **arguments, int left) {
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
    return 0;
}
