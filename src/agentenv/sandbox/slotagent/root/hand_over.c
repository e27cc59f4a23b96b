/* See hand_over.h. */
#define _GNU_SOURCE
#include "hand_over.h"

#include "steps.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

void hand_over(int socket, const char *text, int fd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control;
    memset(&control, 0, sizeof control);
    control.header = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    struct iovec data = {(void *)(unsigned long)text, strlen(text)};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != (ssize_t)data.iov_len)
        fail("hand over", "a descriptor");
}

int open_namespace(const char *kind) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    prctl(PR_SET_DUMPABLE, 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0);
    if (fd < 0)
        fail("open", path);
    return fd;
}
