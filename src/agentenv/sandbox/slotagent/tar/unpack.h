/* Unpacking a tar from standard input. */
#pragma once

#include <sys/types.h>

/* Unpacks it below the directory `path`, which is made with its missing parents, of that owner and mode. No name leads
 * out of it, and no link in it is followed. Directories that exist take the owner, mode and time of their entries; files
 * and links are replaced. Ends the process on failure: with the errno as its exit code, having printed the path. */
void unpack(const char *path, uid_t uid, gid_t gid, mode_t mode);
