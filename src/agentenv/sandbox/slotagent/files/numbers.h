/* Numbers for texts, equal ones alike: what is compared often is numbered once. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include <stddef.h>
#include <stdint.h>

/* `texts`: those that were numbered, in the order of their numbers; number 1 is the first. */
struct numbered { const char *text; size_t bytes; };
struct numbers { struct numbered *texts; uint32_t *slots; size_t count, mask; };

/* There is room for so many texts. They are not copied. */
void open_numbers(struct numbers *numbers, size_t most);
void close_numbers(struct numbers *numbers);

/* The text's number: 0 when it has none, or the next one, which it then has. */
uint32_t find_number(const struct numbers *numbers, const char *text, size_t bytes);
uint32_t give_number(struct numbers *numbers, const char *text, size_t bytes);

#endif
