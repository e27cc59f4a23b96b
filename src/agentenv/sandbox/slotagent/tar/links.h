/* Files with several names: which name of each was written first. */
#pragma once

#include <sys/types.h>

/* The name under which this file was written; NULL, and `path` is remembered, when it was not. */
const char *first_name(dev_t device, ino_t inode, const char *path);
