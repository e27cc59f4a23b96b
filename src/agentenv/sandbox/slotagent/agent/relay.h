/* What a run reads (INPUT, SCRIPT) and prints passes between its pipes, which are here and in the slot, and sockets,
 * whose other ends the server has. The pipes are made here, so that they count against the slot's quota. */
#ifndef RELAY_H
#define RELAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum stream_name { INPUT, SCRIPT, OUT, ERR, ANSWERS, STREAMS };
struct stream {
    int pipe, sock;    /* our ends, or -1 */
    bool full;         /* the receiving end has no room: wait for that, and not for more to carry */
    bool unwatched;    /* not to be looked at yet */
    size_t owed_bytes; /* of OUT, ERR, ANSWERS: what must arrive before anything else is reported */
    uint32_t source_watched, sink_watched;
};
struct relay {
    uint32_t run;
    bool owes;  /* an answer waits for what was printed before it */
    bool ended; /* the run's end is still to be reported, with these two: */
    int32_t status;
    uint64_t usage[3];
    uint64_t input_inode;     /* of the pipe that the run reads, 0 when there is none */
    uint64_t watched_from_ns; /* when its output begins to be watched; 0: it is, or no time is set */
    struct stream streams[STREAMS];
};

/* Keys of the epoll set below this are the loop's own. */
enum { FIRST_RELAY_KEY = 16 };

/* `readiness` is the epoll set that the loop waits for. */
void set_up_relays(int readiness);

/* A relay without streams, and closing all those of one that was not begun. */
void no_streams(struct relay *of, uint32_t run);
void drop_streams(struct relay *of);

/* Adds a stream over `sock` (one of the server's sockets, ours from now on), or over a new one, whose other end is
 * then in *ours. *theirs is the child's end. Both return an errno or 0; what was made is in the relay either way. */
int join_stream(struct relay *of, enum stream_name name, int sock, int *theirs);
int make_stream(struct relay *of, enum stream_name name, int *ours, int *theirs);

/* A run is relayed from begin_relay on, until end_relay has reported its end to the server, which waits until all
 * that it had printed by then is with the server. What its background processes print later goes nowhere. There is
 * room for MAX_RUNS relays. */
void begin_relay(const struct relay *of);
void end_relay(uint32_t run, int32_t status, const uint64_t usage[3]);
size_t runs_relayed(void);
bool is_relayed(uint32_t run);

/* What to do about an event whose key is none of the loop's own. */
void turn_relay(uint64_t key, uint32_t events);

/* How long the loop may wait at most; -1: as long as it takes. */
int relay_timeout_ms(void);

#endif
