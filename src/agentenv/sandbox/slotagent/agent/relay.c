/* Carries what runs print and read between their pipes and the server's sockets. See relay.h.
 *
 * A pipe has a lock. Whoever writes into the pipe by splice or sendfile holds the lock while its source has nothing
 * to give, for as long as it likes, and everybody else who touches that pipe waits: reading without blocking, asking
 * how much is in it, even closing it. Any process of the slot can do that to any pipe of the slot. So no pipe of a
 * slot goes to the server: the server has sockets, whose other ends are here and nowhere else, and it is the agent
 * that is held up. */
#define _GNU_SOURCE
#include "relay.h"

#include "packets.h"
#include "runs.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_BYTES = 1024 * 1024,   /* at once: as much as a pipe can hold */
    ORPHAN_BURST_BYTES = 1024 * 1024, ORPHAN_PAUSE_NS = 10 * 1000 * 1000,
    RUNS_NS = 1000 * 1000, WAITS_NS = 50 * 1000 * 1000,
    MAX_ORPHANS = 16,
    FIRST_ORPHAN = FIRST_RELAY_KEY, /* of the keys of what is watched; from 256 on they are those of streams */
};

static int readiness; /* the epoll set */
static int nowhere;   /* /dev/null */
static struct relay relays[MAX_RUNS];
static size_t relay_count;
static bool watched_later; /* there are outputs that are not watched yet */

static int orphans[MAX_ORPHANS]; /* pipes without a reader; -1 where there is none */
static size_t orphan_next;       /* the oldest, which makes room for the next */
static size_t drained_bytes;     /* of orphans, since the last pause */
static uint64_t paused_until_ns;
static bool paused;

void set_up_relays(int epoll) {
    readiness = epoll;
    nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (size_t i = 0; i < MAX_ORPHANS; i++)
        orphans[i] = -1;
}

/* ---- what is watched ---- */

static void drop(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static int source_of(const struct stream *the, enum stream_name name) {
    return name < OUT ? the->sock : the->pipe;
}

static int sink_of(const struct stream *the, enum stream_name name) {
    return name < OUT ? the->pipe : the->sock;
}

/* EPOLLERR alone means that only errors count, which epoll reports unasked; 0 means not to be watched at all. */
static void watch(int fd, uint32_t *watched, uint32_t events, uint64_t key) {
    if (*watched == events)
        return;
    struct epoll_event wanted = {.events = events, .data.u64 = key};
    epoll_ctl(readiness, !events ? EPOLL_CTL_DEL : *watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &wanted);
    *watched = events;
}

/* Waits for room where the receiving end is full; else for something to carry, and for the other side to go away. */
static void watch_stream(struct relay *of, enum stream_name name) {
    struct stream *the = &of->streams[name];
    if (the->pipe < 0 || (the->unwatched && !the->full))
        return;
    the->unwatched = false;
    uint64_t key = (uint64_t)of->run << 8 | (uint64_t)name << 1;
    bool held = the->full || (name == ANSWERS && of->owes);
    watch(source_of(the, name), &the->source_watched, held ? 0 : EPOLLIN | EPOLLERR, key);
    if (name != SCRIPT || the->full) /* the end of the run that reads it is noticed anyway */
        watch(sink_of(the, name), &the->sink_watched, the->full ? EPOLLOUT | EPOLLERR : EPOLLERR, key | 1);
}

/* Explicitly, and not by closing alone: a child that has not executed its program yet has a copy, which would go on
 * being watched. */
static void unwatch_stream(struct stream *the, enum stream_name name) {
    watch(source_of(the, name), &the->source_watched, 0, 0);
    watch(sink_of(the, name), &the->sink_watched, 0, 0);
}

/* ---- a run's streams ---- */

void no_streams(struct relay *of, uint32_t run) {
    memset(of, 0, sizeof *of);
    of->run = run;
    for (int i = 0; i < STREAMS; i++)
        of->streams[i] = (struct stream){.pipe = -1, .sock = -1};
}

void drop_streams(struct relay *of) {
    for (int i = 0; i < STREAMS; i++) {
        drop(&of->streams[i].pipe);
        drop(&of->streams[i].sock);
    }
}

static int join_to_pipe(struct relay *of, enum stream_name name, int sock, int *theirs) {
    int ends[2];
    of->streams[name].sock = sock;
    if (pipe2(ends, O_CLOEXEC) < 0)
        return errno;
    bool to_slot = name < OUT;
    *theirs = ends[!to_slot];
    of->streams[name].pipe = ends[to_slot];
    struct stat found;
    if (name == INPUT && !fstat(*theirs, &found))
        of->input_inode = found.st_ino;
    return 0;
}

int join_stream(struct relay *of, enum stream_name name, int sock, int *theirs) {
    int flags = fcntl(sock, F_GETFL), error = join_to_pipe(of, name, sock, theirs);
    if (flags < 0 || fcntl(sock, F_SETFL, flags | O_NONBLOCK) < 0)
        return errno;
    return error;
}

int make_stream(struct relay *of, enum stream_name name, int *ours, int *theirs) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        return errno;
    *ours = ends[0];
    return join_to_pipe(of, name, ends[1], theirs);
}

size_t runs_relayed(void) {
    return relay_count;
}

static struct relay *find_relay(uint32_t run) {
    for (size_t i = 0; i < relay_count; i++)
        if (relays[i].run == run)
            return &relays[i];
    return NULL;
}

bool is_relayed(uint32_t run) {
    return find_relay(run);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Most runs end within a moment after their start, or after their script came. Their output is looked at then: to wake
 * up for it earlier would cost more. */
static void watch_in(struct relay *of, uint64_t ns) {
    of->watched_from_ns = now_ns() + ns;
    watched_later = true;
}

void begin_relay(const struct relay *of) {
    struct relay *begun = &relays[relay_count++];
    *begun = *of;
    begun->streams[OUT].unwatched = begun->streams[ERR].unwatched = true;
    for (enum stream_name name = 0; name < STREAMS; name++)
        watch_stream(begun, name);
    watch_in(begun, begun->streams[SCRIPT].pipe < 0 ? RUNS_NS : WAITS_NS);
}

/* Watches the outputs whose time has come. Returns in how many ms there are more of them; -1: there are none. */
static int watch_outputs(void) {
    uint64_t now = now_ns(), next = UINT64_MAX;
    for (size_t i = 0; i < relay_count; i++) {
        struct relay *of = &relays[i];
        if (!of->watched_from_ns)
            continue;
        if (now < of->watched_from_ns) {
            if (of->watched_from_ns < next)
                next = of->watched_from_ns;
            continue;
        }
        of->watched_from_ns = 0;
        for (enum stream_name name = OUT; name <= ERR; name++) {
            of->streams[name].unwatched = false;
            watch_stream(of, name);
        }
    }
    watched_later = next != UINT64_MAX;
    return watched_later ? (int)((next - now) / 1000000) + 1 : -1;
}

/* ---- pipes without a reader ---- */

static void watch_orphan(size_t at, int operation) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = FIRST_ORPHAN + at};
    if (orphans[at] >= 0)
        epoll_ctl(readiness, operation, orphans[at], &wanted);
}

static void drop_orphan(size_t at) {
    watch_orphan(at, EPOLL_CTL_DEL);
    drop(&orphans[at]);
}

/* Throws away what background processes still print, so that they live on undisturbed. Returns whether none of them
 * is left. */
static bool drained(int pipe) {
    ssize_t got = splice(pipe, NULL, nowhere, NULL, MOST_BYTES, SPLICE_F_NONBLOCK);
    if (got > 0)
        drained_bytes += (size_t)got;
    return !got || (got < 0 && errno != EAGAIN && errno != EINTR);
}

/* Takes over a pipe that is not watched any more. */
static void orphan(int *pipe) {
    if (drained(*pipe))
        return;
    size_t at = orphan_next++ % MAX_ORPHANS;
    drop_orphan(at);
    orphans[at] = *pipe;
    *pipe = -1;
    if (!paused)
        watch_orphan(at, EPOLL_CTL_ADD);
}

/* ---- moving ---- */

static size_t waiting_bytes(int fd) {
    int bytes = 0;
    return fd >= 0 && !ioctl(fd, FIONREAD, &bytes) && bytes > 0 ? (size_t)bytes : 0;
}

static void end_stream(struct relay *of, enum stream_name name, bool held) {
    struct stream *the = &of->streams[name];
    if (the->pipe < 0)
        return;
    unwatch_stream(the, name);
    if (held && (name == OUT || name == ERR))
        orphan(&the->pipe); /* its writers can continue without a reader */
    drop(&the->pipe);
    drop(&the->sock);
    the->owed_bytes = 0;
}

/* Moves at most so many bytes. Returns whether any were moved. */
static bool carry(struct relay *of, enum stream_name name, size_t most_bytes) {
    struct stream *the = &of->streams[name];
    if (the->pipe < 0)
        return false;
    int source = source_of(the, name);
    ssize_t moved = splice(source, NULL, sink_of(the, name), NULL, most_bytes, SPLICE_F_NONBLOCK);
    if (!moved || (moved < 0 && errno != EAGAIN && errno != EINTR)) {
        end_stream(of, name, moved);
        return false;
    }
    if (name == SCRIPT && moved > 0) { /* it comes in one piece */
        end_stream(of, name, false);
        if (of->streams[OUT].unwatched)
            watch_in(of, RUNS_NS);
        return false;
    }
    if (moved > 0)
        the->owed_bytes -= the->owed_bytes < (size_t)moved ? the->owed_bytes : (size_t)moved;
    the->full = moved < 0 && waiting_bytes(source) > 0;
    if (moved < 0 && !the->full)
        the->owed_bytes = 0; /* a process of the slot has read them itself */
    watch_stream(of, name);
    return moved > 0;
}

/* Notes what was printed before an answer, or before the end: it must arrive before it. */
static void owe(struct relay *of) {
    of->streams[ANSWERS].owed_bytes = waiting_bytes(of->streams[ANSWERS].pipe);
    for (enum stream_name name = OUT; name <= ERR; name++)
        of->streams[name].owed_bytes = waiting_bytes(of->streams[name].pipe);
}

/* Carries what is owed. Returns whether nothing is any more. */
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
    if (!settle(of, OUT, ERR)) {
        watch_stream(of, ANSWERS); /* stops watching it until then */
        return;
    }
    if (!of->streams[ANSWERS].owed_bytes) /* nothing is in it: the other side has closed */
        carry(of, ANSWERS, MOST_BYTES);
    of->owes = !settle(of, ANSWERS, ANSWERS);
    watch_stream(of, ANSWERS);
}

static bool finished(struct relay *of) {
    return settle(of, OUT, ERR) && settle(of, ANSWERS, ANSWERS);
}

/* Tells first and clears away afterwards, because the server waits only for the first. */
static void tell_end(struct relay *of) {
    say_exited(of->run, of->status, of->usage);
    for (enum stream_name name = 0; name < STREAMS; name++)
        end_stream(of, name, true);
    *of = relays[--relay_count];
}

void end_relay(uint32_t run, int32_t status, const uint64_t usage[3]) {
    struct relay *of = find_relay(run);
    of->ended = true;
    of->status = status;
    memcpy(of->usage, usage, sizeof of->usage);
    owe(of);
    if (finished(of))
        tell_end(of);
}

/* ---- the loop's part ---- */

/* A flood without a reader is not worth a processor: after each burst it is left alone for a moment. */
static bool pausing(void) {
    bool was_paused = paused;
    if (!paused && drained_bytes > ORPHAN_BURST_BYTES) {
        paused_until_ns = now_ns() + ORPHAN_PAUSE_NS;
        paused = true;
    } else if (paused && now_ns() >= paused_until_ns) {
        paused = false;
        drained_bytes = 0;
    }
    for (size_t i = 0; paused != was_paused && i < MAX_ORPHANS; i++)
        watch_orphan(i, paused ? EPOLL_CTL_DEL : EPOLL_CTL_ADD);
    return paused;
}

int relay_timeout_ms(void) {
    int timeout_ms = watched_later ? watch_outputs() : -1;
    return pausing() ? 1 : timeout_ms;
}

static void turn_orphan(size_t at) {
    if (!paused && orphans[at] >= 0 && drained(orphans[at]))
        drop_orphan(at);
}

/* The loop calls this in the order in which streams became ready. So what a program prints on its output and on its
 * errors arrives in nearly the order in which it was printed. */
void turn_relay(uint64_t key, uint32_t events) {
    if (key < MAX_ORPHANS + FIRST_ORPHAN) {
        turn_orphan((size_t)key - FIRST_ORPHAN);
        return;
    }
    struct relay *of = find_relay((uint32_t)(key >> 8));
    enum stream_name name = (key & 0xff) >> 1;
    if (!of || of->streams[name].pipe < 0)
        return;
    if (key & 1 && events & (EPOLLERR | EPOLLHUP)) /* it has no reader any more */
        end_stream(of, name, true);
    else if (name != ANSWERS)
        carry(of, name, MOST_BYTES);
    if (of->owes || (name == ANSWERS && of->streams[ANSWERS].pipe >= 0))
        pass_answers(of);
    if (of->ended && finished(of))
        tell_end(of);
}
