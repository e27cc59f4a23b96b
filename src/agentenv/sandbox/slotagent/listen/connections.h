/* Connections that programs of the slot made. Each holds up to WINDOW_BYTES that its program has not read yet. */
#pragma once
#include "frames.h"

#include <poll.h>
#include <stdbool.h>

enum { MAX_CONNECTIONS = 64, MOST_ANSWERS = 2 };

bool can_accept(void);

/* Takes a connection of this listener. False when there was one that it could not take. Puts one frame at most. */
bool accept_from(int listener);

/* Does what a frame says; puts MOST_ANSWERS frames at most. Ends the program when the frame may not say that. */
void obey(const struct frame *frame);

/* What to wait for, of every connection; and what to do then, as far as there is room for frames. */
void want(struct pollfd wanted[MAX_CONNECTIONS]);
void serve(const struct pollfd wanted[MAX_CONNECTIONS]);
