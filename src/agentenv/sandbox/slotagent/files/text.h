/* Text in the making, and pieces of text. */
#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Starts as all zeros. */
struct text { char *bytes; size_t count, room; };
void add(struct text *text, const char *bytes, size_t count);
__attribute__((format(printf, 2, 3))) void addf(struct text *text, const char *format, ...);

/* As UTF-8, with bytes that are none as \xNN; cut to so many characters. */
void add_shown(struct text *text, const char *bytes, size_t count, size_t max_characters);

/* Ends the program: prints the record 'w' and the text, for the author of the patch. */
_Noreturn void explain(int code, const struct text *text);

/* Makes room for one more at `items[count]`, in steps that double. */
void *with_room(void *items, size_t count, size_t item_bytes);

/* A piece of text that need not end with a NUL. */
struct bytes { const char *at; size_t count; };
bool begins_with(struct bytes bytes, const char *text);
bool equals(struct bytes bytes, const char *text);

/* Without its first bytes; without all bytes of `ends` at its end. */
struct bytes without_start(struct bytes all, size_t skipped);
struct bytes without_end(const char *at, size_t count, const char *ends);

#endif
