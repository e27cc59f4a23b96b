/* Starting a run. See spawn.h. */
#define _GNU_SOURCE
#include "spawn.h"

#include "child.h"
#include "ends.h"
#include "relay.h"
#include "runs.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_STRINGS = MAX_PACKET };

/* What is started: the strings of a SPAWN. `text` is the packet's payload, or with TEXT_FD a file in memory, mapped. */
struct words {
    const char *text, *cwd;
    char **argv, **env; /* in `table` */
    char **table;
    size_t text_bytes, table_bytes; /* of the mappings; 0: not mapped */
};

/* Takes the next string off *text, which ends at `end` and with a NUL. */
static char *next_string(const char **text, const char *end) {
    if (*text == end)
        leave(EXIT_MALFORMED);
    char *found = (char *)(uintptr_t)*text;
    *text += strlen(found) + 1;
    return found;
}

/* Returns false when there is no memory for the table. Leaves when the text is malformed. */
static bool parse_text(const char *text, size_t bytes, struct words *into) {
    static char *small[MAX_STRINGS + 2];
    uint32_t counts[2];
    if (bytes < sizeof counts + 1 || text[bytes - 1])
        leave(EXIT_MALFORMED);
    memcpy(counts, text, sizeof counts);
    const char *next = text + sizeof counts, *end = text + bytes;
    into->cwd = next_string(&next, end);
    size_t wanted = (size_t)counts[0] + counts[1], at = 0;
    if (!counts[0] || wanted > (size_t)(end - next)) /* each string takes at least one byte */
        leave(EXIT_MALFORMED);
    into->table = small;
    if (wanted > MAX_STRINGS) {
        size_t table_bytes = (wanted + 2) * sizeof *small;
        into->table = mmap(NULL, table_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (into->table == MAP_FAILED)
            return false;
        into->table_bytes = table_bytes;
    }
    into->argv = into->table;
    for (; at < counts[0]; at++)
        into->table[at] = next_string(&next, end);
    into->table[at++] = NULL;
    into->env = into->table + at;
    for (; at <= wanted; at++)
        if (!strchr(into->table[at] = next_string(&next, end), '='))
            leave(EXIT_MALFORMED);
    into->table[at] = NULL;
    if (next != end)
        leave(EXIT_MALFORMED);
    return true;
}

/* Of the packet, or with TEXT_FD of its first descriptor, a sealed file that only the server has written. Returns an
 * errno. */
static int take_words(const struct packet *packet, struct words *into) {
    struct stat about;
    if (!(packet->header.arg & TEXT_FD))
        return parse_text(packet->payload, packet->header.payload_bytes, into) ? 0 : ENOMEM;
    if (packet->header.payload_bytes || fstat(packet->fds[0], &about) < 0 || about.st_size <= 0)
        leave(EXIT_MALFORMED);
    into->text = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, packet->fds[0], 0);
    close(packet->fds[0]);
    if (into->text == MAP_FAILED)
        return errno;
    into->text_bytes = (size_t)about.st_size;
    return parse_text(into->text, into->text_bytes, into) ? 0 : ENOMEM;
}

static void free_words(const struct words *words) {
    if (words->text_bytes)
        munmap((void *)(uintptr_t)words->text, words->text_bytes);
    if (words->table_bytes)
        munmap(words->table, words->table_bytes);
}

static bool flags_fit(int flags, size_t fd_count) {
    int of_nine = flags & (SCRIPT_PIPE | SCRIPT_FD | WITH_ANSWERS);
    size_t wanted_fds = (size_t)!!(flags & TEXT_FD) + !!(flags & WITH_STDIN) + !!(flags & (SCRIPT_FD | WITH_ANSWERS));
    if ((flags & ~(WITH_STDIN | PROGRAM | TERMINAL | TEXT_FD)) != of_nine || (of_nine & (of_nine - 1)) || fd_count != wanted_fds)
        return false;
    return !(flags & SCRIPT_PIPE) || !(flags & TERMINAL);
}

/* Returns an errno, or 0 when there may be a run of that number. A number is in use until the run's end was reported. */
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
    struct words words = {0};
    int step = STEP_RESOURCES, error = take_words(packet, &words);
    char **argv = words.argv;
    if (!error && flags & PROGRAM && !*++argv)
        leave(EXIT_MALFORMED);
    struct ends ends = {{-1, -1, -1, -1}, {-1, -1, -1}};
    size_t taken = flags & TEXT_FD ? 1 : 0;
    if (flags & WITH_STDIN)
        ends.child[0] = packet->fds[taken++];
    if (flags & (SCRIPT_FD | WITH_ANSWERS))
        ends.child[3] = packet->fds[taken];
    struct relay relay;
    no_streams(&relay, id);
    if (!error)
        error = room_for_run(id);
    if (!error)
        error = make_ends(flags, &relay, &ends);
    uint64_t started = ticks_now();
    struct beginning beginning = {
        words.cwd, words.argv ? *words.argv : NULL, argv, words.env, ends.child, flags & TERMINAL};
    pid_t pid = error ? -1 : start_child(&beginning, &error, &step);
    free_words(&words);
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
