#define _GNU_SOURCE
#include "frames.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { HEADER_BYTES = 8, KIND_SHIFT = 24, COUNT_MASK = 0xffffff, OUT_BYTES = 256 * 1024, IN_BYTES = 128 * 1024 };

struct buffer {
    size_t at, bytes;
};

static struct buffer out, in;
static char out_data[OUT_BYTES], in_data[IN_BYTES];

void end_with(int error) {
    _exit(error > 0 && error < 126 ? error : EIO);
}

static void to_front(struct buffer *buffer, char *data) {
    memmove(data, data + buffer->at, buffer->bytes);
    buffer->at = 0;
}

/* Where the next bytes go; callers have asked whether they fit. */
static char *out_end(size_t needed) {
    if (out.at + out.bytes + needed > OUT_BYTES)
        to_front(&out, out_data);
    if (out.bytes + needed > OUT_BYTES)
        end_with(ENOBUFS);
    return out_data + out.at + out.bytes;
}

static void put_head(char *to, uint32_t connection, enum kind kind, uint32_t count) {
    uint32_t head[] = {connection, (uint32_t)kind << KIND_SHIFT | count};
    memcpy(to, head, HEADER_BYTES);
}

void put_greeting(void) {
    *out_end(1) = 0;
    out.bytes++;
}

bool frames_fit(size_t count, bool and_data) {
    return OUT_BYTES - out.bytes >= count * HEADER_BYTES + (and_data ? HEADER_BYTES + MAX_DATA_BYTES : 0);
}

void put_frame(uint32_t connection, enum kind kind, uint32_t count) {
    put_head(out_end(HEADER_BYTES), connection, kind, count);
    out.bytes += HEADER_BYTES;
}

ptrdiff_t put_data_from(int fd, uint32_t connection, size_t most) {
    size_t wanted = most < MAX_DATA_BYTES ? most : MAX_DATA_BYTES;
    char *to = out_end(HEADER_BYTES + wanted);
    ssize_t got = read(fd, to + HEADER_BYTES, wanted);
    if (got > 0) {
        put_head(to, connection, DATA, (uint32_t)got);
        out.bytes += HEADER_BYTES + (size_t)got;
    }
    return got;
}

bool frames_wait(void) {
    return out.bytes > 0;
}

void flush_frames(void) {
    ssize_t put = write(STDOUT_FILENO, out_data + out.at, out.bytes);
    if (put < 0) {
        if (errno != EAGAIN && errno != EINTR)
            end_with(errno);
        return;
    }
    out.at += (size_t)put;
    out.bytes -= (size_t)put;
}

void read_frames(void) {
    to_front(&in, in_data); /* less than one frame */
    ssize_t got = read(STDIN_FILENO, in_data + in.bytes, IN_BYTES - in.bytes);
    if (got == 0)
        _exit(0);
    if (got < 0) {
        if (errno != EAGAIN && errno != EINTR)
            end_with(errno);
        return;
    }
    in.bytes += (size_t)got;
}

static bool allowed(uint32_t kind, uint32_t count) {
    switch (kind) {
    case DATA:
        return count >= 1 && count <= MAX_DATA_BYTES;
    case ROOM:
        return count >= 1 && count <= WINDOW_BYTES;
    case OVER:
    case RESET:
        return count == 0;
    default:
        return false;
    }
}

bool next_frame(struct frame *frame) {
    uint32_t head[2];
    if (in.bytes < HEADER_BYTES)
        return false;
    memcpy(head, in_data + in.at, HEADER_BYTES);
    uint32_t kind = head[1] >> KIND_SHIFT, count = head[1] & COUNT_MASK;
    if (!allowed(kind, count))
        end_with(EPROTO);
    size_t bytes = HEADER_BYTES + (kind == DATA ? count : 0);
    if (in.bytes < bytes)
        return false;
    *frame = (struct frame){.connection = head[0], .kind = kind, .count = count};
    frame->data = in_data + in.at + HEADER_BYTES;
    in.at += bytes;
    in.bytes -= bytes;
    return true;
}
