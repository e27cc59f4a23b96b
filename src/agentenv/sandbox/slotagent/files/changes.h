/* Changing several files at once: all of them or none. */
#ifndef CHANGES_H
#define CHANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* A file as it was (`existed`), and as it is to be. */
struct file {
    char *path;
    bool existed, exists, changes;
    mode_t mode;
    char *content;
    size_t bytes;
};

/* Puts those files in place whose numbers `order` has, in that order. New content is staged first, then renamed into
 * place; when that fails, the renames before it are taken back. */
void put_in_place(const struct file *files, const size_t *order, size_t count);

#endif
