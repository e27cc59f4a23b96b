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
#include "steps.h"

#include <errno.h>
#include <linux/capability.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static void drop_privileges(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &header, none) < 0)
        fail("drop", "capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1L, 0L, 0L, 0L) < 0)
        fail("set", "no_new_privs");
}

/* Does what one option says. Returns how many arguments it took. */
static int take_option(char **arguments, int left) {
    int taken = take_common_option(arguments, left);
    if (taken)
        return taken;
    const char *option = arguments[0];
    if (strcmp(option, "-u") == 0 && left > 2) {
        become(arguments[1], arguments[2]);
        return 3;
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
