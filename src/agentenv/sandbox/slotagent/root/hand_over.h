/* Handing a descriptor to the supervisor. */
#pragma once

/* Sends `text` and, with it, a copy of the descriptor `fd` over a socket. Ends the process when that fails. */
void hand_over(int socket, const char *text, int fd);

/* A descriptor of one of our own namespaces (`net`, `user`), which the /proc files of a process that has changed its
 * uid keep even from itself otherwise. Ends the process when there is none. */
int open_namespace(const char *kind);
