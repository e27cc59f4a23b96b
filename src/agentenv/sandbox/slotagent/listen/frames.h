/* Frames on stdin and stdout (agentenv.wire.connections): u32 connection, u32 kind << 24 | count, bytes of DATA. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kind { PORT = 1, OPEN, DATA, OVER, RESET, ROOM };
enum { WINDOW_BYTES = 128 * 1024, ROOM_BYTES = WINDOW_BYTES / 4, MAX_DATA_BYTES = 32 * 1024 };

struct frame {
    uint32_t connection, kind, count;
    const char *data; /* until the next read_frames */
};

/* Ends the program with this errno. */
_Noreturn void end_with(int error);

/* The first byte to be sent, which says that it listens. */
void put_greeting(void);

/* Whether so many frames without data can be put; and one of DATA beside them. */
bool frames_fit(size_t count, bool and_data);

void put_frame(uint32_t connection, enum kind kind, uint32_t count);

/* Reads up to `most` bytes of DATA from `fd` and puts them. Returns what read does; puts nothing unless it is > 0. */
ptrdiff_t put_data_from(int fd, uint32_t connection, size_t most);

bool frames_wait(void);

/* Writes what stdout takes. */
void flush_frames(void);

/* Reads what stdin has, once next_frame has returned everything. Ends the program at the end of stdin. */
void read_frames(void);

/* The next frame that was read whole, of a kind and size that a client may send: otherwise the program ends. */
bool next_frame(struct frame *frame);
