/* Carries what runs print and read between their pipes and the server's sockets. See slotagent.h.
 *
 * Whoever writes into a pipe by splice or sendfile holds the pipe's lock while its source has nothing to give, for
 * as long as it likes, and everybody else who touches that pipe waits: reading without blocking, asking how much is
 * in it, even closing it. Any process of the slot can do that to any pipe of the slot's. So no pipe of a slot's goes
 * to the server: it has sockets, whose other ends are here and nowhere else, and who is held up is the agent. */
#define _GNU_SOURCE
#include "slotagent.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MOST_BYTES = 1024 * 1024,   /* at once: as much as a pipe can hold */
    ORPHAN_BURST_BYTES = 1024 * 1024, ORPHAN_PAUSE_MS = 10,
    MAX_ORPHANS = 16,
};

static struct relay relays[MAX_RUNS];
static size_t relay_count;
static int orphans[MAX_ORPHANS]; /* pipes nobody is to read any more; -1 where empty */
static size_t orphan_next;       /* the oldest, which makes room */
static size_t drained_bytes;     /* of orphans, since the last pause */
static int nowhere;              /* /dev/null */

static void drop(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void set_up_relays(void) {
    nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (size_t i = 0; i < MAX_ORPHANS; i++)
        orphans[i] = -1;
}

/* ---- a run's streams ---- */

void no_streams(struct relay *of) {
    memset(of, 0, sizeof *of);
    for (int i = 0; i < STREAMS; i++)
        of->streams[i] = (struct stream){.pipe = -1, .sock = -1};
}

void drop_streams(struct relay *of) {
    for (int i = 0; i < STREAMS; i++) {
        drop(&of->streams[i].pipe);
        drop(&of->streams[i].sock);
    }
}

bool is_socket(int fd) {
    struct stat found;
    return fd >= 0 && !fstat(fd, &found) && S_ISSOCK(found.st_mode);
}

int join_stream(struct relay *of, enum stream_name name, int sock, int *theirs) {
    int ends[2], flags = fcntl(sock, F_GETFL);
    of->streams[name].sock = sock;
    if (flags < 0 || fcntl(sock, F_SETFL, flags | O_NONBLOCK) < 0 || pipe2(ends, O_CLOEXEC) < 0)
        return errno;
    bool to_slot = name < OUT;
    *theirs = ends[!to_slot];
    of->streams[name].pipe = ends[to_slot];
    struct stat found;
    if (name == INPUT && !fstat(*theirs, &found))
        of->input_inode = found.st_ino;
    return 0;
}

int make_stream(struct relay *of, enum stream_name name, int *ours, int *theirs) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return errno;
    *ours = ends[0];
    return join_stream(of, name, ends[1], theirs);
}

size_t runs_relayed(void) {
    return relay_count;
}

bool is_relayed(uint32_t run) {
    for (size_t i = 0; i < relay_count; i++)
        if (relays[i].run == run)
            return true;
    return false;
}

void begin_relay(const struct relay *of) {
    relays[relay_count++] = *of;
}

/* ---- what nobody reads any more ---- */

/* What background processes still print goes nowhere, so that they live on undisturbed. */
static bool drain_orphan(int *pipe) {
    ssize_t got = splice(*pipe, NULL, nowhere, NULL, MOST_BYTES, SPLICE_F_NONBLOCK);
    if (got > 0)
        drained_bytes += (size_t)got;
    else if (!got || (errno != EAGAIN && errno != EINTR))
        drop(pipe);
    return *pipe >= 0;
}

static void orphan(int *pipe) {
    if (*pipe < 0)
        return;
    if (drain_orphan(pipe)) {
        int *place = &orphans[orphan_next++ % MAX_ORPHANS];
        drop(place);
        *place = *pipe;
    }
    *pipe = -1;
}

/* ---- moving ---- */

static size_t waiting_bytes(int fd) {
    int bytes = 0;
    return fd >= 0 && !ioctl(fd, FIONREAD, &bytes) && bytes > 0 ? (size_t)bytes : 0;
}

static void end_stream(struct relay *of, enum stream_name name) {
    struct stream *the = &of->streams[name];
    if (name == OUT || name == ERR)
        orphan(&the->pipe); /* who prints goes on, though nobody listens; at the end of the pipe nothing is kept */
    drop(&the->pipe);
    drop(&the->sock);
    the->owed_bytes = 0;
}

/* Moves up to so many bytes. Whether any were moved. */
static bool carry(struct relay *of, enum stream_name name, size_t most_bytes) {
    struct stream *the = &of->streams[name];
    if (the->pipe < 0)
        return false;
    int source = name < OUT ? the->sock : the->pipe, sink = name < OUT ? the->pipe : the->sock;
    ssize_t moved = splice(source, NULL, sink, NULL, most_bytes, SPLICE_F_NONBLOCK);
    the->full = false;
    if (moved > 0) {
        the->owed_bytes -= the->owed_bytes < (size_t)moved ? the->owed_bytes : (size_t)moved;
        return true;
    }
    if (moved < 0 && errno == EAGAIN)
        the->full = waiting_bytes(source) > 0;
    else if (!moved || errno != EINTR)
        end_stream(of, name);
    return false;
}

/* What was printed before an answer, or before the end, arrives before it. */
static void owe(struct relay *of) {
    of->streams[ANSWERS].owed_bytes = waiting_bytes(of->streams[ANSWERS].pipe);
    for (enum stream_name name = OUT; name <= ERR; name++)
        of->streams[name].owed_bytes = waiting_bytes(of->streams[name].pipe);
}

static bool settle(struct relay *of, enum stream_name first, enum stream_name last) {
    bool settled = true;
    for (enum stream_name name = first; name <= last; name++) {
        struct stream *the = &of->streams[name];
        while (the->owed_bytes && carry(of, name, the->owed_bytes)) {}
        settled = settled && !the->owed_bytes;
    }
    return settled;
}

static void pass_answers(struct relay *of) {
    if (!of->owes) {
        owe(of);
        of->owes = true;
    }
    if (!settle(of, OUT, ERR))
        return;
    if (!of->streams[ANSWERS].owed_bytes) /* none: it was hung up */
        carry(of, ANSWERS, MOST_BYTES);
    of->owes = !settle(of, ANSWERS, ANSWERS);
}

static bool finished(struct relay *of) {
    if (!settle(of, OUT, ERR) || !settle(of, ANSWERS, ANSWERS))
        return false;
    for (enum stream_name name = 0; name < STREAMS; name++)
        end_stream(of, name);
    return true;
}

/* The relay's place is taken by the last one. */
static void tell_end(size_t at) {
    struct relay done = relays[at];
    relays[at] = relays[--relay_count];
    say_exited(done.run, done.status, done.usage);
}

void end_relay(uint32_t run, int32_t status, const uint64_t usage[3]) {
    for (size_t i = 0; i < relay_count; i++) {
        struct relay *of = &relays[i];
        if (of->run != run)
            continue;
        of->ended = true;
        of->status = status;
        memcpy(of->usage, usage, sizeof of->usage);
        owe(of);
        if (finished(of))
            tell_end(i);
        return;
    }
}

/* ---- the loop's part ---- */

/* Two descriptors of each stream, then the orphans: only what is open, because poll takes no more entries than a
 * process may have descriptors. */
static struct watched { size_t relay; enum stream_name name; } watched[MAX_RUNS * STREAMS];
static size_t watched_count, orphans_watched_from;

/* An end that is full is waited for; else what there is to carry, and whether the other side is gone. */
static void watch_stream(struct pollfd *waits, const struct relay *of, enum stream_name name) {
    const struct stream *the = &of->streams[name];
    int source = name < OUT ? the->sock : the->pipe, sink = name < OUT ? the->pipe : the->sock;
    bool held = the->full || (name == ANSWERS && of->owes);
    waits[0] = (struct pollfd){.fd = held ? -1 : source, .events = POLLIN};
    waits[1] = (struct pollfd){.fd = sink, .events = the->full ? POLLOUT : 0};
}

size_t watch_relays(struct pollfd *waits, int *timeout_ms) {
    watched_count = 0;
    for (size_t i = 0; i < relay_count; i++)
        for (enum stream_name name = 0; name < STREAMS; name++)
            if (relays[i].streams[name].pipe >= 0) {
                watch_stream(waits + 2 * watched_count, &relays[i], name);
                watched[watched_count++] = (struct watched){i, name};
            }
    size_t count = orphans_watched_from = 2 * watched_count;
    if (drained_bytes > ORPHAN_BURST_BYTES) { /* a flood is not worth a processor */
        drained_bytes = 0;
        if (*timeout_ms < 0)
            *timeout_ms = ORPHAN_PAUSE_MS;
        return count;
    }
    for (size_t i = 0; i < MAX_ORPHANS; i++)
        if (orphans[i] >= 0)
            waits[count++] = (struct pollfd){.fd = orphans[i], .events = POLLIN};
    return count;
}

static void turn_stream(struct relay *of, enum stream_name name, const struct pollfd *waits) {
    if (waits[1].revents & (POLLERR | POLLHUP)) /* nobody takes it any more */
        end_stream(of, name);
    else if (name == ANSWERS)
        pass_answers(of);
    else
        carry(of, name, MOST_BYTES);
}

void turn_relays(const struct pollfd *waits, size_t count) {
    for (size_t i = 0; i < watched_count; i++)
        if (waits[2 * i].revents || waits[2 * i + 1].revents)
            turn_stream(&relays[watched[i].relay], watched[i].name, waits + 2 * i);
    for (size_t at = orphans_watched_from; at < count; at++)
        for (size_t i = 0; waits[at].revents && i < MAX_ORPHANS; i++)
            if (orphans[i] == waits[at].fd)
                drain_orphan(&orphans[i]);
    for (size_t i = relay_count; i-- > 0;) {
        struct relay *of = &relays[i];
        if (of->owes)
            pass_answers(of);
        if (of->ended && finished(of))
            tell_end(i);
    }
}
