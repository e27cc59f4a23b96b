/* Changing several files at once: all of them or none. */
#ifndef CHANGES_H
#define CHANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* A file as it was (`existed`, `original`), and as it is to be. `like`: the file whose owner, mode and extended
 * attributes it gets, NULL for those of a new file; `mode`: the bits it gets instead, or KEPT_MODE. `made`: its content
 * comes from another file, or from nowhere. */
struct file {
    char *path;
    const char *like;
    bool existed, exists, changes, made;
    mode_t original_mode;
    int mode;
    char *original, *content;
    size_t original_bytes, bytes;
};

/* Puts those files in place whose numbers `order` has, in that order. New content is staged first, then renamed into
 * place or (see store.h) written over the old; when that fails, what was done before it is taken back. `base`: the
 * directory that the names are relative to, which stays when it becomes empty. */
void put_in_place(const struct file *files, const size_t *order, size_t count, const char *base);

#endif
