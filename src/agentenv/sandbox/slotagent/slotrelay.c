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
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_BYTES = 1024 * 1024,   /* at once: as much as a pipe can hold */
    ORPHAN_BURST_BYTES = 1024 * 1024, ORPHAN_PAUSE_MS = 10,
    MAX_ORPHANS = 16,
    FIRST_ORPHAN = 16, /* of the keys of what is watched; below are the loop's own, from 256 on streams */
};

static struct relay relays[MAX_RUNS];
static size_t relay_count;
static int orphans[MAX_ORPHANS]; /* pipes nobody is to read any more; -1 where empty */
static size_t orphan_next;       /* the oldest, which makes room */
static size_t drained_bytes;     /* of orphans, since the last pause */
static struct timespec paused_until;
static bool paused;
static int nowhere;              /* /dev/null */

void set_up_relays(void) {
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

/* EPOLLERR, which is always watched for, stands for nothing else; 0 for not at all. */
static void watch(int fd, uint32_t *watched, uint32_t events, uint64_t key) {
    if (*watched == events)
        return;
    struct epoll_event wanted = {.events = events, .data.u64 = key};
    epoll_ctl(readiness, !events ? EPOLL_CTL_DEL : *watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &wanted);
    *watched = events;
}

/* An end that is full is waited for; else what there is to carry, and whether the other side is gone. */
static void watch_stream(struct relay *of, enum stream_name name) {
    struct stream *the = &of->streams[name];
    uint64_t key = (uint64_t)of->run << 8 | (uint64_t)name << 1;
    int source = name < OUT ? the->sock : the->pipe, sink = name < OUT ? the->pipe : the->sock;
    bool held = the->full || (name == ANSWERS && of->owes);
    watch(source, &the->source_watched, held ? 0 : EPOLLIN | EPOLLERR, key);
    watch(sink, &the->sink_watched, the->full ? EPOLLOUT | EPOLLERR : EPOLLERR, key | 1);
}

/* By name, because a child that has not executed its program yet has a copy, which would be watched on. */
static void unwatch_stream(struct stream *the, enum stream_name name) {
    int source = name < OUT ? the->sock : the->pipe, sink = name < OUT ? the->pipe : the->sock;
    watch(source, &the->source_watched, 0, 0);
    watch(sink, &the->sink_watched, 0, 0);
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

static struct relay *find_relay(uint32_t run) {
    for (size_t i = 0; i < relay_count; i++)
        if (relays[i].run == run)
            return &relays[i];
    return NULL;
}

bool is_relayed(uint32_t run) {
    return find_relay(run);
}

void begin_relay(const struct relay *of) {
    struct relay *begun = &relays[relay_count++];
    *begun = *of;
    for (enum stream_name name = 0; name < STREAMS; name++)
        if (begun->streams[name].pipe >= 0)
            watch_stream(begun, name);
}

/* ---- what nobody reads any more ---- */

static void watch_orphan(size_t at, int operation) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = FIRST_ORPHAN + at};
    if (orphans[at] >= 0)
        epoll_ctl(readiness, operation, orphans[at], &wanted);
}

static void drop_orphan(size_t at) {
    watch_orphan(at, EPOLL_CTL_DEL);
    drop(&orphans[at]);
}

/* What background processes still print goes nowhere, so that they live on undisturbed. Whether none is left. */
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

static void end_stream(struct relay *of, enum stream_name name) {
    struct stream *the = &of->streams[name];
    if (the->pipe < 0)
        return;
    unwatch_stream(the, name);
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
    if (!moved || (moved < 0 && errno != EAGAIN && errno != EINTR)) {
        end_stream(of, name);
        return false;
    }
    if (moved > 0)
        the->owed_bytes -= the->owed_bytes < (size_t)moved ? the->owed_bytes : (size_t)moved;
    the->full = moved < 0 && waiting_bytes(source) > 0;
    watch_stream(of, name);
    return moved > 0;
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
    if (of->streams[ANSWERS].pipe >= 0)
        watch_stream(of, ANSWERS);
}

static bool finished(struct relay *of) {
    if (!settle(of, OUT, ERR) || !settle(of, ANSWERS, ANSWERS))
        return false;
    for (enum stream_name name = 0; name < STREAMS; name++)
        end_stream(of, name);
    return true;
}

static void tell_end(struct relay *of) {
    struct relay done = *of;
    *of = relays[--relay_count];
    say_exited(done.run, done.status, done.usage);
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

/* How long from now to the end of the pause, in ms, at least 1; 0 when it is over. */
static int pause_left_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t left_ns = (paused_until.tv_sec - now.tv_sec) * 1000000000LL + paused_until.tv_nsec - now.tv_nsec;
    return left_ns <= 0 ? 0 : (int)(left_ns / 1000000) + 1;
}

/* A flood is not worth a processor: what nobody reads is left alone for a moment after each burst. */
int relay_timeout_ms(void) {
    if (!paused && drained_bytes > ORPHAN_BURST_BYTES) {
        clock_gettime(CLOCK_MONOTONIC, &paused_until);
        paused_until.tv_nsec += ORPHAN_PAUSE_MS * 1000000;
        paused = true;
        for (size_t i = 0; i < MAX_ORPHANS; i++)
            watch_orphan(i, EPOLL_CTL_DEL);
    }
    if (!paused)
        return -1;
    int left_ms = pause_left_ms();
    if (left_ms)
        return left_ms;
    paused = false;
    drained_bytes = 0;
    for (size_t i = 0; i < MAX_ORPHANS; i++)
        watch_orphan(i, EPOLL_CTL_ADD);
    return -1;
}

static void turn_orphan(size_t at) {
    if (!paused && orphans[at] >= 0 && drained(orphans[at]))
        drop_orphan(at);
}

/* Streams are turned to in the order in which they became ready, so that what a program says on its output and its
 * errors arrives in the order in which it was said, or nearly. */
void turn_relay(uint64_t key, uint32_t events) {
    if (key < MAX_ORPHANS + FIRST_ORPHAN) {
        turn_orphan((size_t)key - FIRST_ORPHAN);
        return;
    }
    struct relay *of = find_relay((uint32_t)(key >> 8));
    enum stream_name name = (key & 0xff) >> 1;
    if (!of || of->streams[name].pipe < 0)
        return;
    if (key & 1 && events & (EPOLLERR | EPOLLHUP)) /* nobody takes it any more */
        end_stream(of, name);
    else if (name == ANSWERS)
        pass_answers(of);
    else
        carry(of, name, MOST_BYTES);
    if (of->owes)
        pass_answers(of);
    if (of->ended && finished(of))
        tell_end(of);
}
