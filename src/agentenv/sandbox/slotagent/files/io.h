/* Input, output, and the way out. Whatever fails anywhere in slotfiles ends the program: see fail(). */
#ifndef IO_H
#define IO_H

#include <stddef.h>
#include <stdint.h>

/* Exit codes below 128 are errnos; these are our own verdicts. */
enum {
    OUTSIDE = 200, UNSUPPORTED_KERNEL = 201, NOT_REGULAR = 202, INPUT_CUT_SHORT = 203, TOO_LARGE = 204, USAGE = 205,
    DOES_NOT_FIT = 206, NO_PATCH = 207, /* of `patch`, which says why */
    BAD_PATTERN = 208, NO_RIPGREP = 209, /* of `search`; of the first it says why */
};
enum { PATH_BYTES = 8192, CHUNK = 65536 };
#define CHUNKED UINT64_MAX    /* as a size: content comes as `u32 bytes, bytes` until a zero, then its SHA-256 */
#define BROKEN_OFF UINT32_MAX /* as a chunk's size: the sender failed; `u32 code` follows, and nothing else */

/* The path and the link's target follow it; after that, in an archive and for 'f', the content. */
struct record {
    /* f(ile) d(irectory) l(ink) o(ther) n(ew file) m(ode of a directory made before) h(it) p(atched) w(hy) x e(nd) */
    uint8_t kind;
    uint8_t truncated; /* of 'e': the list was cut off at its limit */
    uint16_t mode;
    uint32_t path_bytes, link_bytes, zero;
    uint64_t size;
    int64_t modified_ns;
};

/* Ends the program with that code, after reporting the failure and undoing what is half done. */
_Noreturn void fail(int code);

/* How a failure is reported on stdout, to readers of a stream: by an 'x' record (size: the code, path: where) or
 * by a broken-off chunk. At first it is not reported. */
enum telling { TELL_NOTHING, TELL_RECORD, TELL_CHUNK };
void tell_failures(enum telling how);

/* From here on, failures are reported for this path. */
void blame(const char *path);

/* What fail() does first, or NULL: takes back what is half done. */
void undo_with(void (*undo)(void));

/* A decimal argument; does not return when it is none. */
uint64_t number(const char *text);

/* stdin and stdout, buffered. take_some gives up to `wanted` bytes in place, never none. */
void flush(void);
void put(const void *bytes, size_t count);
size_t take_some(const char **bytes, uint64_t wanted);
void take(void *into, size_t count);

#endif
