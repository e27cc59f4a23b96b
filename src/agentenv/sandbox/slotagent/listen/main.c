/* slotlisten: a port of the slot whose connections are answered outside it.
 *
 *   slotlisten PORT        (0: any free one)
 *
 * listens on the slot's own 127.0.0.1, and on ::1 where the slot has it, and writes one byte to stdout when it does.
 * From then on stdin and stdout carry frames, little-endian: u32 connection, u32 kind << 24 | bytes, and for DATA the
 * bytes.
 *
 *   PORT   out         connection: the port it listens on
 *   OPEN   out         a new connection
 *   DATA   both ways
 *   OVER   both ways   its sender sends no more
 *   RESET  both ways   broken off
 *   ROOM   both ways   `bytes` more may be sent
 *
 * Each side may send WINDOW bytes for a connection before the first ROOM, so one that nobody reads holds up no other.
 * Connections beyond MOST wait in the kernel's queue. The end of stdin ends it; a frame that breaks these rules too.
 * Ends with the errno of what failed. Static: it works in any root.
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
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PORT = 1, OPEN, DATA, OVER, RESET, ROOM };
enum { MOST = 64, WINDOW = 128 * 1024, PIECE = 32 * 1024, HEADER = 8, OUT_BYTES = 256 * 1024, BACKLOG = 128 };
enum { FAMILIES = 2, MAX_PORT = 65535 };

static _Noreturn void end_with(int error) {
    _exit(error > 0 && error < 126 ? error : EIO);
}

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
struct connection {
    int fd;
    uint32_t id;
    size_t room;             /* what may still be sent out */
    size_t at, bytes;        /* what came in and is not yet written */
    bool out_over, in_over;  /* nothing more goes out; nothing more comes in */
    char in[WINDOW];
};

static struct connection *open_[MOST];
static char out[OUT_BYTES];
static size_t out_at, out_bytes;
static char in[HEADER + PIECE];
static size_t in_bytes;

static size_t out_room(void) {
    return OUT_BYTES - out_bytes;
}

static char *frame(uint32_t id, uint32_t kind, uint32_t bytes, size_t payload) {
    if (out_at) {
        memmove(out, out + out_at, out_bytes);
        out_at = 0;
    }
    if (out_room() < HEADER + payload)
        end_with(ENOBUFS); /* callers leave room */
    uint32_t head[2] = {id, kind << 24 | bytes};
    memcpy(out + out_bytes, head, HEADER);
    char *body = out + out_bytes + HEADER;
    out_bytes += HEADER + payload;
    return body;
}

static void drop(size_t place, bool tell) {
    struct connection *one = open_[place];
    if (tell)
        frame(one->id, RESET, 0, 0);
    close(one->fd);
    free(one);
    open_[place] = NULL;
}

static void settle(size_t place) {
    if (open_[place] && open_[place]->out_over && open_[place]->in_over && !open_[place]->bytes)
        drop(place, false);
}

static void take(int listener, uint32_t *last) {
    size_t place = 0;
    while (place < MOST && open_[place])
        place++;
    if (place == MOST)
        return;
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), now = 1;
    if (fd < 0)
        return;
    struct connection *one = calloc(1, sizeof *one);
    if (!one) {
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
    one->fd = fd;
    one->id = ++*last;
    one->room = WINDOW;
    open_[place] = one;
    frame(one->id, OPEN, 0, 0);
}

/* From a program of the slot. */
static void read_from(size_t place) {
    struct connection *one = open_[place];
    char piece[PIECE];
    ssize_t got = read(one->fd, piece, one->room < PIECE ? one->room : PIECE);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got < 0) {
        drop(place, true);
        return;
    }
    if (got == 0) {
        one->out_over = true;
        frame(one->id, OVER, 0, 0);
        settle(place);
        return;
    }
    one->room -= (size_t)got;
    memcpy(frame(one->id, DATA, (uint32_t)got, (size_t)got), piece, (size_t)got);
}

/* To a program of the slot. */
static void write_to(size_t place) {
    struct connection *one = open_[place];
    if (one->bytes) {
        ssize_t put = write(one->fd, one->in + one->at, one->bytes);
        if (put < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (put < 0) {
            drop(place, true);
            return;
        }
        one->at += (size_t)put;
        one->bytes -= (size_t)put;
        frame(one->id, ROOM, (uint32_t)put, 0);
    }
    if (!one->bytes) {
        one->at = 0;
        if (one->in_over)
            shutdown(one->fd, SHUT_WR);
    }
    settle(place);
}

static void obey(uint32_t id, uint32_t kind, uint32_t bytes, const char *body) {
    size_t place = 0;
    while (place < MOST && !(open_[place] && open_[place]->id == id))
        place++;
    if (place == MOST)
        return; /* it has gone meanwhile */
    struct connection *one = open_[place];
    if (kind == DATA) {
        if (one->bytes + bytes > WINDOW)
            end_with(EPROTO);
        memmove(one->in, one->in + one->at, one->bytes);
        memcpy(one->in + one->bytes, body, bytes);
        one->at = 0;
        one->bytes += bytes;
    } else if (kind == OVER) {
        one->in_over = true;
    } else if (kind == RESET) {
        struct linger at_once = {.l_onoff = 1, .l_linger = 0};
        setsockopt(one->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        drop(place, false);
        return;
    } else if (kind == ROOM) {
        one->room += bytes;
        return;
    } else {
        end_with(EPROTO);
    }
    write_to(place);
}

static void hear(void) {
    ssize_t got = read(STDIN_FILENO, in + in_bytes, sizeof in - in_bytes);
    if (got == 0)
        _exit(0);
    if (got < 0) {
        if (errno == EAGAIN || errno == EINTR)
            return;
        end_with(errno);
    }
    in_bytes += (size_t)got;
    for (;;) {
        uint32_t head[2];
        if (in_bytes < HEADER)
            return;
        memcpy(head, in, HEADER);
        uint32_t kind = head[1] >> 24, bytes = head[1] & 0xffffff;
        size_t payload = kind == DATA ? bytes : 0;
        if (payload > PIECE)
            end_with(EPROTO);
        if (in_bytes < HEADER + payload)
            return;
        if (out_room() < 2 * HEADER)
            return; /* taken up again when stdout has been read */
        obey(head[0], kind, bytes, in + HEADER);
        in_bytes -= HEADER + payload;
        memmove(in, in + HEADER + payload, in_bytes);
    }
}

/* Port 0 is chosen by the first family; if the other has it taken, that is an error like any. */
static void listen_at_loopback(uint16_t port, int listeners[FAMILIES]) {
    listeners[0] = listen_at(AF_INET, &port);
    if (listeners[0] < 0)
        end_with(errno);
    listeners[1] = listen_at(AF_INET6, &port);
    if (listeners[1] < 0 && errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL)
        end_with(errno);
    out[0] = 0;
    out_bytes = 1;
    frame(port, PORT, 0, 0);
}

static void flush_out(void) {
    ssize_t put = write(STDOUT_FILENO, out + out_at, out_bytes);
    if (put < 0 && errno != EAGAIN && errno != EINTR)
        end_with(errno);
    out_at += put > 0 ? (size_t)put : 0;
    out_bytes -= put > 0 ? (size_t)put : 0;
}

static void wait_and_pass(const int listeners[FAMILIES], uint32_t *last) {
    struct pollfd wanted[MOST + FAMILIES + 2], *accepting = wanted + MOST, *ends = accepting + FAMILIES;
    bool spare = false, room = out_room() >= 4 * HEADER + PIECE;
    for (size_t i = 0; i < MOST; i++) {
        struct connection *one = open_[i];
        spare |= !one;
        int events = one && room ? (!one->out_over && one->room ? POLLIN : 0) | (one->bytes ? POLLOUT : 0) : 0;
        wanted[i] = (struct pollfd){.fd = events ? one->fd : -1, .events = (short)events};
    }
    for (size_t i = 0; i < FAMILIES; i++)
        accepting[i] = (struct pollfd){.fd = spare && room ? listeners[i] : -1, .events = POLLIN};
    ends[0] = (struct pollfd){.fd = room ? STDIN_FILENO : -1, .events = POLLIN};
    ends[1] = (struct pollfd){.fd = out_bytes ? STDOUT_FILENO : -1, .events = POLLOUT};
    if (poll(wanted, MOST + FAMILIES + 2, -1) < 0) {
        if (errno != EINTR)
            end_with(errno);
        return;
    }
    if (ends[1].revents)
        flush_out();
    if (ends[0].revents && out_room() >= 4 * HEADER)
        hear();
    for (size_t i = 0; i < FAMILIES; i++)
        if (accepting[i].revents && out_room() >= HEADER)
            take(listeners[i], last);
    for (size_t i = 0; i < MOST; i++) {
        if (open_[i] && wanted[i].revents & POLLOUT && out_room() >= 2 * HEADER)
            write_to(i);
        if (open_[i] && wanted[i].revents & (POLLIN | POLLHUP | POLLERR) && !open_[i]->out_over && open_[i]->room &&
            out_room() >= 2 * HEADER + PIECE)
            read_from(i);
    }
}

int main(int argc, char **argv) {
    if (argc != 2)
        end_with(EINVAL);
    signal(SIGPIPE, SIG_IGN);
    int listeners[FAMILIES];
    listen_at_loopback(port_of(argv[1]), listeners);
    for (int fd = 0; fd < 2; fd++)
        if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0)
            end_with(errno);
    uint32_t last = 0;
    for (;;)
        wait_and_pass(listeners, &last);
}
