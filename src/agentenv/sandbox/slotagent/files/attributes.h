/* What a file is apart from its content: owner, permission bits, access list, extended attributes. */
#ifndef ATTRIBUTES_H
#define ATTRIBUTES_H

#include "paths.h"

/* Gives those of the regular file at `from` to the new, empty file `fd`: all that can be given. An errno when one of
 * them cannot, or 0. */
int copy_attributes(int fd, const struct place *from);

/* The regular file that was found at `place`, opened for writing; -1 with errno, ESTALE when there is another by now. */
int open_found(const struct place *place);

#endif
