/* A directory with all that is in it, as a tar. */
#pragma once

#include <stdbool.h>

/* Writes everything below `directory`, which it takes, with names relative to it, in order, parents first. As a `layer`
 * (of an image, as the OCI image specification has it) the marks of overlayfs become whiteouts, and what slotroot puts
 * into every root is left out. */
void write_directory_tree(int directory, bool layer);

/* Writes one file, which is not a directory, under its name. */
void write_single(int directory, const char *name);
