/* See userns.h. The namespace lives as long as somebody holds its descriptor: no process stays in it. */
#define _GNU_SOURCE
#include "userns.h"

#include "steps.h"

#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SOCKET = 3 };

static void send_descriptor(int fd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control;
    memset(&control, 0, sizeof control);
    control.header = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    char byte = 'n';
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    if (sendmsg(SOCKET, &message, 0) != 1)
        fail("send", "the namespace");
}

/* Files in /proc of a process that is not dumpable belong to root of the namespace above, who writes the maps and needs
 * no capability for it. We can open our own only while we are dumpable. */
void make_user_namespace(const char *uid, bool nested) {
    char byte;
    become(uid, uid);
    if (unshare(CLONE_NEWUSER) < 0)
        fail("make", "a user namespace");
    prctl(PR_SET_DUMPABLE, 1);
    int namespace = open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0);
    if (namespace < 0)
        fail("open", "the user namespace");
    send_descriptor(namespace);
    if (read(SOCKET, &byte, 1) != 1)
        _exit(127); /* whoever started us is gone, or gave up */
    prctl(PR_SET_DUMPABLE, 1);
    if (!nested)
        put("forbid", "/proc/sys/user/max_user_namespaces", "0");
    _exit(0);
}
