/* Starting a run. See spawn.h. */
#define _GNU_SOURCE
#include "spawn.h"

#include "child.h"
#include "ends.h"
#include "relay.h"
#include "runs.h"

#include <errno.h>
#include <string.h>

enum { MAX_STRINGS = MAX_PACKET };

static char *strings[MAX_STRINGS + 2]; /* argv, NULL, env, NULL */

/* Cuts the payload in place into strings[]. Returns cwd; leaves when malformed. */
static const char *parse_payload(char *payload, size_t bytes, char ***env) {
    uint16_t counts[2];
    if (bytes < sizeof counts + 1 || payload[bytes - 1])
        leave(EXIT_MALFORMED);
    memcpy(counts, payload, sizeof counts);
    char *next = payload + sizeof counts, *end = payload + bytes;
    const char *cwd = next;
    next += strlen(next) + 1;
    size_t wanted = (size_t)counts[0] + counts[1], at = 0;
    if (!counts[0] || wanted > (size_t)(end - next)) /* each string takes at least one byte */
        leave(EXIT_MALFORMED);
    for (size_t i = 0; i < wanted; i++) {
        if (i == counts[0])
            strings[at++] = NULL;
        if (next == end || (i >= counts[0] && !strchr(next, '=')))
            leave(EXIT_MALFORMED);
        strings[at++] = next;
        next += strlen(next) + 1;
    }
    if (next != end)
        leave(EXIT_MALFORMED);
    strings[at++] = NULL;
    strings[at] = NULL; /* without any env, this one ends it */
    *env = strings + counts[0] + 1;
    return cwd;
}

static bool flags_fit(int flags, size_t fd_count) {
    int of_nine = flags & (SCRIPT_PIPE | SCRIPT_FD | WITH_ANSWERS);
    size_t wanted_fds = !!(flags & WITH_STDIN) + (size_t)!!(flags & (SCRIPT_FD | WITH_ANSWERS));
    if ((flags & ~(WITH_STDIN | PROGRAM | TERMINAL)) != of_nine || (of_nine & (of_nine - 1)) || fd_count != wanted_fds)
        return false;
    return !(flags & SCRIPT_PIPE) || !(flags & TERMINAL);
}

/* Returns an errno, or 0 when there may be a run of that number. A number is in use until the run's end was told. */
static int room_for_run(uint32_t id) {
    if (is_relayed(id))
        return EEXIST; /* a server that came back after a crash may not know what runs */
    return runs_relayed() == MAX_RUNS ? EAGAIN : 0;
}

static void say_failed(uint32_t id, int error, int step) {
    uint32_t payload = (uint32_t)step;
    say(SPAWN_FAILED, id, error, &payload, sizeof payload, NULL, 0);
}

static size_t count_server_ends(int flags) {
    return flags & TERMINAL ? 1 : flags & SCRIPT_PIPE ? 3 : 2;
}

void spawn(const struct packet *packet) {
    int flags = packet->header.arg;
    uint32_t id = packet->header.run;
    if (!id || !flags_fit(flags, packet->fd_count))
        leave(EXIT_MALFORMED);
    char **env;
    const char *cwd = parse_payload(packet->payload, packet->header.payload_bytes, &env), *program = strings[0];
    char **argv = flags & PROGRAM ? strings + 1 : strings;
    if (!*argv)
        leave(EXIT_MALFORMED);
    struct ends ends = {{-1, -1, -1, -1}, {-1, -1, -1}};
    size_t taken = 0;
    if (flags & WITH_STDIN)
        ends.child[0] = packet->fds[taken++];
    if (flags & (SCRIPT_FD | WITH_ANSWERS))
        ends.child[3] = packet->fds[taken];
    struct relay relay;
    no_streams(&relay, id);
    int step = STEP_RESOURCES, error = room_for_run(id);
    if (!error)
        error = make_ends(flags, &relay, &ends);
    uint64_t started = ticks_now();
    struct beginning beginning = {cwd, program, argv, env, ends.child, flags & TERMINAL};
    pid_t pid = error ? -1 : start_child(&beginning, &error, &step);
    close_all(ends.child, 4); /* those of the packet's descriptors that are left are among them */
    if (error) {
        drop_streams(&relay);
        close_all(ends.server, 3);
        say_failed(id, error, step);
        return;
    }
    remember_run(id, pid, started);
    begin_relay(&relay);
    say(SPAWNED, id, pid, &relay.input_inode, sizeof relay.input_inode, ends.server, count_server_ends(flags));
    close_all(ends.server, 3);
}
