/* The user namespace of an image slot. */
#pragma once

#include <stdbool.h>

/* Becomes `uid`, makes a user namespace, sends its descriptor over the socket on descriptor 3, and waits there for a
 * byte: by then the supervisor has written the maps. Unless `nested`, no user namespace can be made below it. Ends the
 * process. */
_Noreturn void make_user_namespace(const char *uid, bool nested);
