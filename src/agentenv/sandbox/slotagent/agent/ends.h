/* What a child's descriptors are: pipes over which it is relayed, files in the slot's own memory, or a terminal. */
#ifndef ENDS_H
#define ENDS_H

#include "relay.h"

/* `child`: what becomes its descriptors 0, 1, 2 and 9. `server`: the other ends, which SPAWNED carries. -1: none. */
struct ends { int child[4], server[3]; };

/* Makes everything that a child with these flags (enum spawn_flag) is to have. What the server has attached is in
 * `ends` already. Returns an errno or 0; what was made is in `ends` and in `relay` either way. */
int make_ends(int flags, struct relay *relay, struct ends *ends);

void close_all(int *fds, size_t count);

#endif
