/* See userns.h. The namespace lives as long as its descriptor is open: no process stays in it. */
#define _GNU_SOURCE
#include "userns.h"

#include "hand_over.h"
#include "steps.h"

#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { SOCKET = 3 };

/* Files in /proc of a process that is not dumpable belong to root of the namespace above, who writes the maps and needs
 * no capability for it. We can open our own only while we are dumpable. */
void make_user_namespace(const char *uid, bool nested) {
    char byte;
    become_maker(uid, uid, 0);
    if (unshare(CLONE_NEWUSER) < 0)
        fail("make", "a user namespace");
    hand_over(SOCKET, "u", open_namespace("user"));
    if (read(SOCKET, &byte, 1) != 1)
        _exit(127); /* our parent has ended, or closed its end */
    prctl(PR_SET_DUMPABLE, 1);
    if (!nested)
        put("forbid", "/proc/sys/user/max_user_namespaces", "0");
    _exit(0);
}
