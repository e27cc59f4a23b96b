/* slotlisten: a port of the slot whose connections are answered outside it.
 *
 *   slotlisten PORT        (0: any free one)
 *
 * listens at the port of the slot's own 127.0.0.1, and of ::1 where the slot has it, and writes one byte to stdout when
 * it does. From then on stdin and stdout carry the frames of agentenv.wire.connections; the first is PORT.
 *
 * A connection that nobody reads holds up no other, in either direction. Connections beyond MAX_CONNECTIONS wait in the
 * kernel's queue. The end of stdin ends it, also when nobody reads its stdout; a frame that breaks the rules does, with
 * EPROTO. Ends with the errno of what failed. Static: it works in any root.
 */
#define _GNU_SOURCE
#include "connections.h"
#include "frames.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 128, FAMILIES = 2, MAX_PORT = 65535, MOST_TRIES = 16, PAUSE_MS = 100 };
enum { STDIN_AT = MAX_CONNECTIONS, STDOUT_AT, LISTENERS_AT, POLLED = LISTENERS_AT + FAMILIES };

static uint16_t port_of(const char *text) {
    char *end = NULL;
    long port = strtol(text, &end, 10);
    if (end == text || *end || port < 0 || port > MAX_PORT)
        end_with(EINVAL);
    return (uint16_t)port;
}

/* A listening socket, or -1 with errno. Sets `port` to the one it has. */
static int listen_at(int family, uint16_t *port) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(*port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(*port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct sockaddr *address = family == AF_INET ? (struct sockaddr *)&four : (struct sockaddr *)&six;
    socklen_t bytes = family == AF_INET ? sizeof four : sizeof six;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
    if (fd < 0)
        return -1;
    if ((family == AF_INET6 && setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes)) ||
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) || bind(fd, address, bytes) ||
        listen(fd, BACKLOG) || getsockname(fd, address, &bytes)) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    *port = ntohs(family == AF_INET ? four.sin_port : six.sin6_port);
    return fd;
}

/* The second listener is -1 where the slot has no ::1. Any free port is chosen by the first; it may be taken at ::1. */
static uint16_t listen_at_loopback(uint16_t wanted, int listeners[FAMILIES]) {
    for (int tries = 1;; tries++) {
        uint16_t port = wanted;
        listeners[0] = listen_at(AF_INET, &port);
        if (listeners[0] < 0)
            end_with(errno);
        listeners[1] = listen_at(AF_INET6, &port);
        if (listeners[1] >= 0 || errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL)
            return port;
        if (errno != EADDRINUSE || wanted || tries == MOST_TRIES)
            end_with(errno);
        close(listeners[0]);
    }
}

/* False when a connection could not be taken: the next try waits. */
static bool accept_all(const int listeners[FAMILIES], const struct pollfd *polled) {
    bool taken = true;
    for (size_t i = 0; i < FAMILIES; i++)
        if (polled[i].revents && can_accept() && frames_fit(1, false))
            taken &= accept_from(listeners[i]);
    return taken;
}

static void pass_on(const int listeners[FAMILIES]) {
    struct pollfd polled[POLLED];
    struct frame frame;
    bool accepting = true;
    for (;;) {
        if (frames_wait())
            flush_frames();
        while (frames_fit(MOST_ANSWERS, false) && next_frame(&frame))
            obey(&frame);
        bool obeyed = frames_fit(MOST_ANSWERS, false); /* otherwise stdin waits for stdout; only its end is noticed */
        want(polled);
        polled[STDIN_AT] = (struct pollfd){.fd = STDIN_FILENO, .events = obeyed ? POLLIN : 0};
        polled[STDOUT_AT] = (struct pollfd){.fd = frames_wait() ? STDOUT_FILENO : -1, .events = POLLOUT};
        for (size_t i = 0; i < FAMILIES; i++) {
            bool takes = accepting && can_accept() && frames_fit(1, false);
            polled[LISTENERS_AT + i] = (struct pollfd){.fd = takes ? listeners[i] : -1, .events = POLLIN};
        }
        if (poll(polled, POLLED, accepting ? -1 : PAUSE_MS) < 0) {
            if (errno != EINTR)
                end_with(errno);
            continue;
        }
        if (polled[STDIN_AT].revents && !obeyed)
            _exit(0);
        if (polled[STDIN_AT].revents)
            read_frames();
        serve(polled);
        accepting = accept_all(listeners, polled + LISTENERS_AT);
    }
}

int main(int argc, char **argv) {
    int listeners[FAMILIES];
    if (argc != 2)
        end_with(EINVAL);
    signal(SIGPIPE, SIG_IGN);
    uint16_t port = listen_at_loopback(port_of(argv[1]), listeners);
    put_greeting();
    put_frame(port, PORT, 0);
    for (int fd = STDIN_FILENO; fd <= STDOUT_FILENO; fd++)
        if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0)
            end_with(errno);
    pass_on(listeners);
}
