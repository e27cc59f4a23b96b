/* SHA-256 (FIPS 180-4), so that both ends of a transfer can tell whether they hold the same bytes. */
#ifndef SUM_H
#define SUM_H

#include <stddef.h>
#include <stdint.h>

enum { SUM_BLOCK = 64, SUM_BYTES = 32 };
struct sum { uint32_t state[8]; uint64_t bytes; unsigned char block[SUM_BLOCK]; };
void sum_begin(struct sum *sum);
void sum_add(struct sum *sum, const void *bytes, size_t count);
void sum_end(struct sum *sum, unsigned char digest[SUM_BYTES]);

#endif
