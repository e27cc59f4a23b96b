#define _GNU_SOURCE
#include "connections.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

struct connection {
    int fd;
    uint32_t id;
    size_t room;            /* what may still be sent to the client */
    bool out_over, in_over; /* the program sends no more; the client sends no more */
    size_t at, bytes;       /* a ring: what came from the client and is not yet written */
    size_t taken;           /* what was written since the client was last given room */
    char ring[WINDOW_BYTES];
};

static struct connection *connections[MAX_CONNECTIONS];
static uint32_t last_id;

static size_t place_of(uint32_t id) {
    size_t place = 0;
    while (place < MAX_CONNECTIONS && !(connections[place] && connections[place]->id == id))
        place++;
    return place;
}

static size_t free_place(void) {
    size_t place = 0;
    while (place < MAX_CONNECTIONS && connections[place])
        place++;
    return place;
}

bool can_accept(void) {
    return free_place() < MAX_CONNECTIONS;
}

bool accept_from(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), now = 1;
    if (fd < 0)
        return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
    struct connection *one = malloc(sizeof *one);
    if (!one) {
        close(fd);
        return false;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
    one->fd = fd;
    one->id = ++last_id;
    one->room = WINDOW_BYTES;
    one->out_over = one->in_over = false;
    one->at = one->bytes = one->taken = 0;
    connections[free_place()] = one;
    put_frame(one->id, OPEN, 0);
    return true;
}

static void drop(size_t place) {
    close(connections[place]->fd);
    free(connections[place]);
    connections[place] = NULL;
}

/* Its program has broken it off. */
static void drop_and_tell(size_t place) {
    put_frame(connections[place]->id, RESET, 0);
    drop(place);
}

/* The client has broken it off: its program is to see that. */
static void break_off(size_t place) {
    struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    setsockopt(connections[place]->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    drop(place);
}

static bool drop_if_over(size_t place) {
    const struct connection *one = connections[place];
    if (!one->out_over || !one->in_over || one->bytes)
        return false;
    drop(place);
    return true;
}

static void read_from_program(size_t place) {
    struct connection *one = connections[place];
    ptrdiff_t got = put_data_from(one->fd, one->id, one->room);
    if (got > 0) {
        one->room -= (size_t)got;
    } else if (got == 0) {
        one->out_over = true;
        put_frame(one->id, OVER, 0);
        drop_if_over(place);
    } else if (errno != EAGAIN && errno != EINTR) {
        drop_and_tell(place);
    }
}

static ssize_t write_ring(const struct connection *one) {
    size_t first = WINDOW_BYTES - one->at < one->bytes ? WINDOW_BYTES - one->at : one->bytes;
    const struct iovec parts[] = {
        {.iov_base = (char *)one->ring + one->at, .iov_len = first},
        {.iov_base = (char *)one->ring, .iov_len = one->bytes - first},
    };
    return writev(one->fd, parts, 2);
}

/* Writes what waits. Once the client sends no more, its program is told so after the last byte. */
static void write_to_program(size_t place) {
    struct connection *one = connections[place];
    if (one->bytes) {
        ssize_t put = write_ring(one);
        if (put < 0) {
            if (errno != EAGAIN && errno != EINTR)
                drop_and_tell(place);
            return;
        }
        one->at = (one->at + (size_t)put) % WINDOW_BYTES;
        one->bytes -= (size_t)put;
        one->taken += (size_t)put;
        if (one->taken >= ROOM_BYTES) {
            put_frame(one->id, ROOM, (uint32_t)one->taken);
            one->taken = 0;
        }
    }
    if (one->in_over && !one->bytes && !drop_if_over(place))
        shutdown(one->fd, SHUT_WR);
}

static void keep(struct connection *one, const struct frame *frame) {
    if (one->in_over || one->bytes + frame->count > WINDOW_BYTES)
        end_with(EPROTO);
    size_t end = (one->at + one->bytes) % WINDOW_BYTES;
    size_t first = WINDOW_BYTES - end < frame->count ? WINDOW_BYTES - end : frame->count;
    memcpy(one->ring + end, frame->data, first);
    memcpy(one->ring, frame->data + first, frame->count - first);
    one->bytes += frame->count;
}

void obey(const struct frame *frame) {
    if (frame->connection == 0 || frame->connection > last_id)
        end_with(EPROTO);
    size_t place = place_of(frame->connection);
    if (place == MAX_CONNECTIONS)
        return; /* it has ended meanwhile */
    struct connection *one = connections[place];
    switch (frame->kind) {
    case DATA:
        keep(one, frame);
        write_to_program(place);
        break;
    case OVER:
        if (one->in_over)
            end_with(EPROTO);
        one->in_over = true;
        write_to_program(place);
        break;
    case RESET:
        break_off(place);
        break;
    case ROOM:
        if (frame->count > WINDOW_BYTES - one->room)
            end_with(EPROTO);
        one->room += frame->count;
        break;
    default:
        end_with(EPROTO);
    }
}

/* A connection of which nothing can be read or written now is not waited for at all, unless its program has sent
 * everything: then its break is the next thing that can come. Otherwise poll would return at once, again and again. */
void want(struct pollfd wanted[MAX_CONNECTIONS]) {
    bool room = frames_fit(MOST_ANSWERS, true);
    for (size_t place = 0; place < MAX_CONNECTIONS; place++) {
        const struct connection *one = connections[place];
        wanted[place] = (struct pollfd){.fd = -1};
        if (!one || !room)
            continue;
        if (!one->out_over && one->room)
            wanted[place].events |= POLLIN;
        if (one->bytes)
            wanted[place].events |= POLLOUT;
        if (wanted[place].events || one->out_over)
            wanted[place].fd = one->fd;
    }
}

void serve(const struct pollfd wanted[MAX_CONNECTIONS]) {
    for (size_t place = 0; place < MAX_CONNECTIONS; place++) {
        struct connection *one = connections[place];
        if (!one || wanted[place].fd != one->fd || !wanted[place].revents || !frames_fit(MOST_ANSWERS, true))
            continue;
        bool broken = wanted[place].revents & (POLLHUP | POLLERR);
        bool reads = wanted[place].events & POLLIN, writes = wanted[place].events & POLLOUT;
        if (broken && !reads && !writes)
            drop_and_tell(place);
        if (reads && (broken || wanted[place].revents & POLLIN))
            read_from_program(place);
        if (writes && connections[place] && (broken || wanted[place].revents & POLLOUT))
            write_to_program(place);
    }
}
