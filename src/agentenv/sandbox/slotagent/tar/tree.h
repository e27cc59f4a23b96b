/* A directory with all that is in it, as a tar. */
#pragma once

enum purpose {
    FILES, /* of one file system: what is mounted below (/proc, /dev) is an empty directory */
    LAYER, /* of an image, as the OCI image specification has it: the marks of overlayfs become whiteouts, and what
              slotroot puts into every root is left out */
    WHOLE, /* to be unpacked as it is: with the directory itself as ".", times of access, and holes */
};

/* Opens a directory for it; -1 and ENOTDIR if it is something else. */
int open_tree_root(const char *path, enum purpose purpose);

/* Writes everything below `directory`, which it takes, with names relative to it, in order, parents first. */
void write_directory_tree(int directory, enum purpose purpose);

/* Writes one file, which is not a directory, under its name. */
void write_single(int directory, const char *name);
