/* The packets that are exchanged with the server, and the way out. docs/slot-agent.md is the contract. */
#ifndef PACKETS_H
#define PACKETS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_PACKET = 64 * 1024, MAX_FDS = 4 };
enum kind {
    SPAWN = 1, KILL = 2, KILL_ALL = 3, PING = 4, SIGNAL = 5, KILL_BEFORE = 6,
    HELLO = 100, SPAWNED = 101, SPAWN_FAILED = 102, EXITED = 103, KILLED = 104, PONG = 105,
};
enum spawn_flag {
    WITH_STDIN = 1, SCRIPT_PIPE = 2, SCRIPT_FD = 4, PROGRAM = 8, TERMINAL = 16, WITH_ANSWERS = 32, TEXT_FD = 64,
};
enum exit_code { EXIT_USAGE = 64, EXIT_MALFORMED = 65, EXIT_SYSTEM = 71 };

struct header { uint32_t kind, run; int32_t arg; uint32_t payload_bytes; };

/* The payload lies in a buffer that the next packet overwrites; the descriptors are the receiver's. */
struct packet { struct header header; char *payload; int fds[MAX_FDS]; size_t fd_count; };

/* `socket` is connected to the server. `before_leaving` is what leave() does first. */
void open_packets(int socket, void (*before_leaving)(void));

_Noreturn void leave(int code);

/* Blocks while the server is slow: an EXIT must not be lost, and a slot has no other client. Leaves when the
 * server has closed. */
void say(enum kind kind, uint32_t run, int32_t arg, const void *payload, size_t bytes, const int *fds, size_t fd_count);

/* The same for a packet that is nothing but its header. */
void say_short(enum kind kind, uint32_t run, int32_t arg);

/* `usage`: microseconds in user and in system mode, KiB of memory at most. */
void say_exited(uint32_t run, int32_t status, const uint64_t usage[3]);

/* Receives one packet; false when there is none. Leaves at the end of the socket and at anything malformed. */
bool take_packet(struct packet *into);

#endif
