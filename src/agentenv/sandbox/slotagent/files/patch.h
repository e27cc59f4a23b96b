/* patch: what a unified diff makes of the files it names, put in place all at once. */
#ifndef PATCH_H
#define PATCH_H

#include <stdint.h>

/* Prints a record for each part of the diff (path, link: the old path; mode: what was done, a letter), each followed by
 * three u64: hunks, fuzz, offset in lines; then `e`. When the text (so many bytes of stdin) is no diff, or does not fit
 * the files, prints the record 'w' (size: bytes) and why, and changes nothing. */
void run_patch(const char *path, const char *strip, uint64_t fuzz, uint64_t bytes);

#endif
