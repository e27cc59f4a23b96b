/* Sending and receiving packets. See packets.h. */
#define _GNU_SOURCE
#include "packets.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAUSE_NS = 1000 * 1000 };

_Static_assert(sizeof(struct header) == 16, "the header is 16 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, unswapped");

union control { char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; };

static int peer;
static void (*first_of_all)(void);
static char buffer[MAX_PACKET];

void open_packets(int socket, void (*before_leaving)(void)) {
    peer = socket;
    first_of_all = before_leaving;
}

_Noreturn void leave(int code) {
    first_of_all();
    _exit(code);
}

/* ---- sending ---- */

static void attach(struct msghdr *message, union control *control, const int *fds, size_t count) {
    memset(control, 0, sizeof *control);
    control->align.cmsg_level = SOL_SOCKET;
    control->align.cmsg_type = SCM_RIGHTS;
    control->align.cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(&control->align), fds, count * sizeof(int));
    message->msg_control = control->bytes;
    message->msg_controllen = CMSG_SPACE(count * sizeof(int));
}

void say(
    enum kind kind, uint32_t run, int32_t arg, const void *payload, size_t bytes, const int *fds, size_t fd_count) {
    struct header header = {(uint32_t)kind, run, arg, (uint32_t)bytes};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)(uintptr_t)payload, bytes}};
    union control control;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = bytes ? 2 : 1};
    if (fd_count)
        attach(&message, &control, fds, fd_count);
    for (;;) {
        if (sendmsg(peer, &message, MSG_NOSIGNAL) >= 0)
            return;
        if (errno == EAGAIN) { /* the server made our end non-blocking */
            struct pollfd writable = {.fd = peer, .events = POLLOUT};
            poll(&writable, 1, -1);
        } else if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) {
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL); /* passes when the server reads */
        } else if (errno != EINTR) {
            leave(0);
        }
    }
}

void say_short(enum kind kind, uint32_t run, int32_t arg) {
    say(kind, run, arg, NULL, 0, NULL, 0);
}

void say_exited(uint32_t run, int32_t status, const uint64_t usage[3]) {
    say(EXITED, run, status, usage, 3 * sizeof usage[0], NULL, 0);
}

/* ---- receiving ---- */

static void take_fds(struct msghdr *message, struct packet *into) {
    into->fd_count = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            leave(EXIT_MALFORMED);
        size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        if (count > MAX_FDS - into->fd_count)
            leave(EXIT_MALFORMED);
        memcpy(into->fds + into->fd_count, CMSG_DATA(part), count * sizeof(int));
        into->fd_count += count;
    }
}

bool take_packet(struct packet *into) {
    union control control;
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    ssize_t got = recvmsg(peer, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN))
        return false;
    if (got <= 0)
        leave(0);
    take_fds(&message, into);
    if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || (size_t)got < sizeof into->header)
        leave(EXIT_MALFORMED);
    memcpy(&into->header, buffer, sizeof into->header);
    if (into->header.payload_bytes != (size_t)got - sizeof into->header)
        leave(EXIT_MALFORMED);
    into->payload = buffer + sizeof into->header;
    return true;
}
