/* slotdial: a connection to a server in the slot.
 *
 *   slotdial PORT
 *
 * connects to the port at the slot's own 127.0.0.1, or else ::1, and writes one byte to stdout when that is done. Then it
 * passes stdin on to the server and what the server sends to stdout, each until its end: the end of stdin closes the
 * connection for sending only, the server's end closes stdout. It never holds more than one buffer for each direction,
 * and neither direction waits for the other. Ends with the errno of what failed. Static: it works in any root.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BUFFER_BYTES = 64 * 1024, FLOWS = 2, MAX_PORT = 65535 };

struct flow {
    int from, to;
    bool over;
    size_t at, bytes;
    char buffer[BUFFER_BYTES];
};

static _Noreturn void end_with(int error) {
    _exit(error > 0 && error < 126 ? error : EIO);
}

static uint16_t port_of(const char *text) {
    char *end = NULL;
    long port = strtol(text, &end, 10);
    if (end == text || *end || port < 1 || port > MAX_PORT)
        end_with(EINVAL);
    return (uint16_t)port;
}

static int dial(int family, const struct sockaddr *address, socklen_t bytes) {
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (!connect(fd, address, bytes))
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int dial_loopback(uint16_t port) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = dial(AF_INET, (const struct sockaddr *)&four, sizeof four), error = errno;
    if (fd < 0)
        fd = dial(AF_INET6, (const struct sockaddr *)&six, sizeof six);
    if (fd < 0)
        end_with(error); /* of the first: the second may not even exist */
    return fd;
}

/* The receiver will get no more. */
static void finish(struct flow *flow) {
    flow->over = true;
    if (flow->to == STDOUT_FILENO)
        close(flow->to);
    else
        shutdown(flow->to, SHUT_WR);
}

/* Reads or writes once, whichever is next. */
static void move(struct flow *flow) {
    if (flow->bytes) {
        ssize_t put = write(flow->to, flow->buffer + flow->at, flow->bytes);
        if (put < 0 && errno != EAGAIN && errno != EINTR) {
            if (flow->to == STDOUT_FILENO)
                end_with(errno);
            flow->bytes = 0; /* the server takes no more, but may still have something to send */
            flow->over = true;
            return;
        }
        flow->at += put > 0 ? (size_t)put : 0;
        flow->bytes -= put > 0 ? (size_t)put : 0;
        return;
    }
    ssize_t got = read(flow->from, flow->buffer, sizeof flow->buffer);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got < 0 && flow->to == STDOUT_FILENO)
        end_with(errno); /* the server has broken off */
    if (got <= 0)
        finish(flow);
    flow->at = 0;
    flow->bytes = got > 0 ? (size_t)got : 0;
}

static void pass_on(struct flow *flows) {
    struct pollfd wanted[FLOWS];
    while (!flows[0].over || !flows[1].over) {
        for (int i = 0; i < FLOWS; i++) {
            wanted[i].fd = flows[i].over ? -1 : flows[i].bytes ? flows[i].to : flows[i].from;
            wanted[i].events = flows[i].bytes ? POLLOUT : POLLIN;
            wanted[i].revents = 0;
        }
        if (poll(wanted, FLOWS, -1) < 0 && errno != EINTR)
            end_with(errno);
        for (int i = 0; i < FLOWS; i++)
            if (wanted[i].revents)
                move(&flows[i]);
    }
}

int main(int argc, char **argv) {
    static struct flow flows[FLOWS];
    if (argc != 2)
        end_with(EINVAL);
    signal(SIGPIPE, SIG_IGN);
    int server = dial_loopback(port_of(argv[1])), now = 1;
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
    if (write(STDOUT_FILENO, "", 1) != 1)
        end_with(errno);
    int ends[] = {STDIN_FILENO, STDOUT_FILENO, server};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (fcntl(ends[i], F_SETFL, fcntl(ends[i], F_GETFL) | O_NONBLOCK) < 0)
            end_with(errno);
    flows[0] = (struct flow){.from = STDIN_FILENO, .to = server};
    flows[1] = (struct flow){.from = server, .to = STDOUT_FILENO};
    pass_on(flows);
    return 0;
}
