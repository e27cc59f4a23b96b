/* Trees as records: out of the slot (list, archive, send) and into it (extract, receive). */
#ifndef STREAM_H
#define STREAM_H

#include <stdbool.h>
#include <stdint.h>

void run_list(const char *path, uint64_t depth, uint64_t limit, bool hidden);
void run_archive(const char *path, uint64_t max_bytes, uint64_t max_entries);
void run_send(const char *path, uint64_t max_entries);
void run_extract(const char *path);
void run_receive(const char *path);

#endif
