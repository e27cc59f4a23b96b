/* SPAWN: from the packet to a run. */
#ifndef SPAWN_H
#define SPAWN_H

#include "packets.h"

/* Answers SPAWNED or SPAWN_FAILED; leaves when the packet is malformed. */
void spawn(const struct packet *packet);

#endif
