/* The system calls that a slot may use. call_list.c is written from the container's seccomp profile. */
#ifndef CALL_LIST_H
#define CALL_LIST_H

#include <stdbool.h>

/* `nested`: programs of the slot may make user namespaces, and mounts in those. */
bool is_listed(long number, bool nested);

#endif
