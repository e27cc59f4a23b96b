/* Writing a tar to standard output: ustar headers with PAX records (POSIX.1-2017, pax). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

/* Begins the extended header of the next entry. */
void begin_records(void);

/* Adds `key=value` to it; `value` may hold any bytes. */
void add_record(const char *key, const void *value, size_t bytes);

/* Adds a time in nanoseconds to it. */
void add_time(const char *key, const struct timespec *moment);

/* A part of a file. */
struct extent {
    off_t from, bytes;
};

/* The headers of an entry. `type` is one of those of ustar; `path` and `link` of any length. The content of a regular
 * file of `found->st_size` bytes has to follow, by write_content() and end_content(). */
void write_header(const char *path, char type, const struct stat *found, const char *link);

/* The headers of a regular file with holes, in GNU's sparse format 1.0: only the content of these parts has to follow. */
void write_sparse_header(const char *path, const struct stat *found, const struct extent *extents, size_t count);

void write_content(const void *data, size_t bytes);
void end_content(void);

/* The end of the archive. */
void end_archive(void);
