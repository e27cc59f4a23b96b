/* Reading a diff line by line. See diff.h. */
#define _GNU_SOURCE
#include "diff.h"

#include "io.h"
#include "text.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN_HEADER = 200, SHOWN_NAME = 200 };

static struct patch *patch;
static int strip;
static size_t line_at, line_bytes, next_line; /* the line at hand: its start, its length, the start of the next */
static uint32_t line_number;

static _Noreturn void wrong(uint32_t number, const char *why) {
    struct text text = {0};
    addf(&text, "line %u: %s", number, why);
    explain(NO_PATCH, &text);
}

/* ---- lines ---- */

/* Where the line that begins at `at` stops: after its newline, or at the end of the text. */
static size_t stop_of(size_t at) {
    const char *newline = at < patch->bytes ? memchr(patch->text + at, '\n', patch->bytes - at) : NULL;
    return newline ? (size_t)(newline - patch->text) + 1 : patch->bytes;
}

/* The line so many `ahead` of the one at hand, without its end; empty beyond the last. */
static struct bytes line(int ahead) {
    size_t at = line_at, stop = next_line;
    for (; ahead; ahead--)
        at = stop, stop = stop_of(at);
    return without_end(patch->text + at, stop - at, "\r\n");
}

static void advance(void) {
    line_at = next_line;
    next_line = stop_of(line_at);
    line_bytes = next_line - line_at;
    line_number++;
}

static bool at_end(void) {
    return line_at >= patch->bytes;
}

static bool names_follow(int ahead) {
    return begins_with(line(ahead), "--- ") && begins_with(line(ahead + 1), "+++ ");
}

/* ---- names ---- */

/* Names are kept until the program ends. */
struct kept_name { struct kept_name *next; char text[]; };
static struct kept_name *kept_names;

static char *room_for_name(size_t bytes) {
    struct kept_name *name = calloc(1, sizeof *name + bytes + 1);
    if (!name)
        fail(ENOMEM);
    name->next = kept_names;
    kept_names = name;
    return name->text;
}

static char *kept(struct bytes name) {
    if (memchr(name.at, 0, name.count))
        wrong(line_number, "a file name is empty or contains a NUL byte");
    return memcpy(room_for_name(name.count), name.at, name.count);
}

/* Undoes how git quotes names that are not plain ASCII; others are left as they are. */
static struct bytes unquoted(struct bytes name) {
    static const char letters[] = "ntr\"\\abf", meant[] = "\n\t\r\"\\\a\b\f";
    name = without_end(name.at, name.count, "\r");
    if (!begins_with(name, "\""))
        return name;
    const char *at = name.at + 1, *end = memrchr(name.at, '"', name.count);
    char *made = room_for_name(name.count);
    size_t count = 0;
    while (at < end) {
        if (*at != '\\' || at + 1 == end) {
            made[count++] = *at++;
        } else if (end - at > 3 && at[1] >= '0' && at[1] <= '3' && at[2] >= '0' && at[2] <= '7' && at[3] >= '0' &&
                   at[3] <= '7') {
            made[count++] = (char)((at[1] - '0') << 6 | (at[2] - '0') << 3 | (at[3] - '0'));
            at += 4;
        } else {
            const char *known = at[1] ? strchr(letters, at[1]) : NULL;
            made[count++] = known ? meant[known - letters] : at[1];
            at += 2;
        }
    }
    return (struct bytes){made, count};
}

static bool has_git_prefix(struct bytes name) {
    return name.count >= 2 && name.at[1] == '/' && name.at[0] && strchr("abiwco12", name.at[0]);
}

/* A name without its prefix. `bare`: it has none, as git writes names after `rename` and `copy`. */
static struct bytes stripped(struct bytes name, bool prefixed, bool bare) {
    if (strip == NO_STRIP)
        return prefixed && has_git_prefix(name) ? without_start(name, 2) : name;
    struct bytes rest = name;
    for (int left = bare && strip ? strip - 1 : strip; left; left--) {
        const char *slash = memchr(rest.at, '/', rest.count);
        if (!slash) {
            struct text text = {0};
            addf(&text, "line %u: strip=%d removes all of '", line_number, strip);
            add_shown(&text, name.at, name.count, SHOWN_NAME);
            add(&text, "'", 1);
            explain(NO_PATCH, &text);
        }
        rest = without_start(rest, (size_t)(slash - rest.at) + 1);
    }
    return rest;
}

/* A name as it is written after `--- `: a tab ends it (git writes one after a name with spaces, others a time), unless
 * it is quoted. */
static struct bytes header_name(struct bytes rest) {
    if (begins_with(rest, "\""))
        return unquoted(rest);
    const char *tab = memchr(rest.at, '\t', rest.count);
    return tab ? (struct bytes){rest.at, (size_t)(tab - rest.at)} : without_end(rest.at, rest.count, " \r\n\v\f");
}

/* `bare`: the names have no prefixes. */
static void take_names(struct part *part, bool bare) {
    struct bytes old = header_name(without_start(line(0), 4)), new = header_name(without_start(line(1), 4));
    bool no_old = equals(old, "/dev/null"), no_new = equals(new, "/dev/null");
    bool git_like = !bare && (no_old || has_git_prefix(old)) && (no_new || has_git_prefix(new));
    if (!no_old)
        old = stripped(old, git_like, false);
    if (!no_new)
        new = stripped(new, git_like, false);
    if (no_old && no_new)
        wrong(line_number, "both names are /dev/null");
    if (!part->renames && !part->copies) {
        part->creates |= no_old;
        part->deletes |= no_new;
        /* Two different names are a rename only when git says so; otherwise patch(1) takes the new one. */
        part->new = no_new ? NULL : kept(new);
        part->old = no_old ? NULL : kept(no_new ? old : new);
    }
    advance();
    advance();
}

/* The name in `a/X b/X`, which only says something when both are the same. `bare`: it is `X X`, without prefixes (git's
 * own are never the same). */
static char *same_name(struct bytes rest, bool *bare) {
    rest = without_end(rest.at, rest.count, "\r");
    struct bytes old = {rest.at, rest.count / 2}, new = without_start(rest, rest.count / 2 + 1);
    bool halves = old.count && new.count == old.count && old.at[old.count] == ' ';
    *bare = halves && !memcmp(old.at, new.at, old.count);
    if (begins_with(rest, "\"")) {
        const char *end = memmem(rest.at, rest.count, "\" ", 2);
        old = unquoted((struct bytes){rest.at, end ? (size_t)(end - rest.at) + 1 : 0});
    } else if (!halves || (!*bare && (old.count <= 2 || memcmp(old.at + 2, new.at + 2, old.count - 2)))) {
        return NULL;
    }
    return kept(stripped(old, !*bare, false));
}

/* ---- git's header lines ---- */

static int mode_in(struct bytes digits) {
    unsigned mode = 0;
    bool octal = digits.count && digits.count <= 7;
    for (size_t i = 0; octal && i < digits.count; i++) {
        octal = digits.at[i] >= '0' && digits.at[i] <= '7';
        mode = mode << 3 | (unsigned)(digits.at[i] - '0');
    }
    if (!octal)
        wrong(line_number, "the file mode is not an octal number");
    if ((mode & 0170000) != 0100000)
        wrong(line_number, "only regular files can be patched, not links or submodules");
    return (int)(mode & 0777);
}

/* One of git's header lines; false when it is something else. */
static bool take_extended(struct part *part) {
    struct bytes text = line(0);
    bool rename = begins_with(text, "rename "), copy = begins_with(text, "copy ");
    struct bytes rest = without_start(text, rename ? 7 : 5);
    if (begins_with(text, "index ") || begins_with(text, "similarity ") || begins_with(text, "dissimilarity ") ||
        begins_with(text, "old mode")) {
    } else if (begins_with(text, "new mode ")) {
        part->mode = mode_in(without_start(text, 9));
    } else if (begins_with(text, "new file mode ")) {
        part->creates = true, part->mode = mode_in(without_start(text, 14));
    } else if (begins_with(text, "deleted file mode ")) {
        part->deletes = true, mode_in(without_start(text, 18));
    } else if ((rename || copy) && begins_with(rest, "from ")) {
        part->old = kept(stripped(unquoted(without_start(rest, 5)), false, true));
    } else if ((rename || copy) && begins_with(rest, "to ")) {
        part->new = kept(stripped(unquoted(without_start(rest, 3)), false, true));
        part->renames = rename, part->copies = copy;
    } else if (begins_with(text, "GIT binary") || begins_with(text, "Binary files")) {
        wrong(line_number, "binary patches are not supported; use write_file instead");
    } else {
        return false;
    }
    return true;
}

/* ---- hunks ---- */

/* Up to nine digits; -1 when there are none, or more. */
static int64_t digits(struct bytes *rest) {
    int64_t value = 0;
    size_t count = 0;
    for (; count < rest->count && isdigit((unsigned char)rest->at[count]); count++)
        value = count < 9 ? value * 10 + (rest->at[count] - '0') : -1;
    *rest = without_start(*rest, count);
    return count && count <= 9 ? value : -1;
}

/* ` SIGN START[,COUNT]` */
static bool take_range(struct bytes *rest, const char *sign, int64_t *start, int64_t *count) {
    if (!begins_with(*rest, sign))
        return false;
    *rest = without_start(*rest, strlen(sign));
    *start = digits(rest), *count = 1;
    if (*start >= 0 && begins_with(*rest, ",")) {
        *rest = without_start(*rest, 1);
        *count = digits(rest);
    }
    return *start >= 0 && *count >= 0;
}

/* The lines that a hunk's header announces and that have not come yet; `known` when it has numbers. `old_ended`,
 * `new_ended`: that side's file ended, without a newline. */
struct counts { bool known, old_ended, new_ended; int64_t old, new; };

static bool more_to_come(const struct counts *counts) {
    return counts->old > 0 || counts->new > 0;
}

/* Such as `2.39` or `2.39.1-rc0`, which git writes below the last patch of a mail. */
static bool is_version(struct bytes text) {
    if (digits(&text) < 0 || !begins_with(text, "."))
        return false;
    text = without_start(text, 1);
    if (digits(&text) < 0)
        return false;
    for (size_t i = 0; i < text.count; i++)
        if (isspace((unsigned char)text.at[i]))
            return false;
    return true;
}

/* Whether an empty line is one of context, and not the end of the text or what separates two files. */
static bool goes_on(const struct counts *counts) {
    if (counts->known)
        return more_to_come(counts);
    struct bytes next = line(1);
    return next.count && strchr(" +-", *next.at) && *next.at && !names_follow(1);
}

/* Whether the line at hand is none of the hunk's although it could be one: the counts are used up (or there were none),
 * and it looks like what comes after a hunk. */
static bool ends_hunk(const struct counts *counts) {
    struct bytes text = line(0);
    if (equals(text, "-- ") && is_version(line(1)))
        return true; /* the end of a mail that git wrote */
    if (counts->known && more_to_come(counts))
        return false;
    return equals(text, "-- ") || equals(text, "--") || names_follow(0);
}

static void add_line(struct hunk *hunk, uint32_t kind, size_t skipped, struct counts *counts) {
    if ((kind != ADDED && counts->old_ended) || (kind != REMOVED && counts->new_ended))
        wrong(line_number, "'\\ No newline at end of file' is before this line, which is of the same file");
    const char *text = patch->text + line_at + skipped;
    size_t bytes = line_bytes - skipped;
    bytes -= bytes && text[bytes - 1] == '\n'; /* the text's own last line may lack it */
    bool crlf = bytes && text[bytes - 1] == '\r';
    patch->lines = with_room(patch->lines, patch->line_count, sizeof *patch->lines);
    patch->lines[patch->line_count++] = (struct line){
        .text = (uint32_t)(line_at + skipped), .bytes = (uint32_t)(bytes - crlf) & 0x3fffffff, .kind = kind & 3,
        .key = crlf ? END_CRLF : END_LF};
    hunk->count++;
    hunk->old += kind != ADDED, counts->old -= kind != ADDED;
    hunk->new += kind != REMOVED, counts->new -= kind != REMOVED;
}

/* '\ No newline at end of file' is about the line before it. A CR there is part of that line; but when the remark itself
 * ends with CR LF, all of the patch was given such ends. */
static void cut_newline(const struct hunk *hunk, struct counts *counts) {
    if (!hunk->count)
        return;
    struct line *last = &patch->lines[patch->line_count - 1];
    bool crlf = line_bytes > 1 && patch->text[line_at + line_bytes - 2] == '\r' &&
                patch->text[next_line - 1] == '\n';
    if (last->key == END_CRLF && !crlf)
        last->bytes = (last->bytes + 1) & 0x3fffffff;
    last->key = END_NONE;
    counts->old_ended |= last->kind != ADDED, counts->new_ended |= last->kind != REMOVED;
}

static void take_body(struct hunk *hunk, struct counts *counts) {
    for (; !at_end(); advance()) {
        char kind = patch->text[line_at];
        if (kind == '\\') {
            cut_newline(hunk, counts);
        } else if (!line(0).count) {
            if (!goes_on(counts))
                return;
            add_line(hunk, CONTEXT, 0, counts);
        } else if ((kind == ' ' || kind == '-' || kind == '+') && !ends_hunk(counts)) {
            add_line(hunk, kind == ' ' ? CONTEXT : kind == '-' ? REMOVED : ADDED, 1, counts);
        } else {
            return;
        }
    }
}

/* The line at hand is none of a hunk's. Refuses the patch if lines with signs follow, up to an empty line or the next
 * header: then a sign was forgotten, and they would be left out. Not when the hunk has all that its header announces:
 * anything may follow then. */
static void check_end(const struct counts *counts) {
    if (at_end() || (counts->known && !counts->old && !counts->new))
        return;
    struct bytes text = line(0);
    size_t at = line_at, next = next_line;
    while (text.count && !begins_with(text, "@@") && !begins_with(text, "diff ") && !equals(text, "-- ")) {
        size_t stop = stop_of(next);
        struct bytes after = without_end(patch->text + next, stop - next, "\r\n");
        if (begins_with(text, "--- ") && begins_with(after, "+++ "))
            return;
        if (at != line_at && (*text.at == '+' || *text.at == '-'))
            wrong(line_number, "this line is inside a hunk, but begins with none of ' ', '+' and '-'");
        at = next, next = stop, text = after;
    }
}

static void count_context(struct hunk *hunk) {
    const struct line *lines = patch->lines + hunk->first;
    while (hunk->before < hunk->count && lines[hunk->before].kind == CONTEXT)
        hunk->before++;
    if (hunk->before < hunk->count)
        while (lines[hunk->count - 1 - hunk->after].kind == CONTEXT)
            hunk->after++;
}

static void take_hunk(void) {
    struct bytes header = line(0), rest = without_start(header, 2);
    int64_t start, new_start;
    struct counts counts = {0};
    counts.known = take_range(&rest, " -", &start, &counts.old) && take_range(&rest, " +", &new_start, &counts.new) &&
                   begins_with(rest, " @@");
    header = without_end(header.at, header.count, " \t\v\f");
    struct hunk hunk = {.at_line = line_number, .header = (uint32_t)line_at, .first = patch->line_count,
                        .start = counts.known ? start : -1, .header_bytes = (uint32_t)header.count};
    advance();
    take_body(&hunk, &counts);
    check_end(&counts);
    if (!hunk.count) {
        struct text text = {0};
        addf(&text, "line %u: the hunk ", hunk.at_line);
        add_shown(&text, header.at, header.count, SHOWN_HEADER);
        addf(&text, " has no lines");
        explain(NO_PATCH, &text);
    }
    count_context(&hunk);
    patch->hunks = with_room(patch->hunks, patch->hunk_count, sizeof *patch->hunks);
    patch->hunks[patch->hunk_count++] = hunk;
}

static void take_hunks(struct part *part) {
    part->first_hunk = patch->hunk_count;
    while (!at_end() && begins_with(line(0), "@@"))
        take_hunk();
    part->hunks = patch->hunk_count - part->first_hunk;
    if (!part->hunks)
        wrong(line_number, "no '@@ -1,2 +1,3 @@' hunk follows the file names");
}

/* ---- parts ---- */

static struct part take_git_part(void) {
    struct part part = {.at_line = line_number, .mode = -1};
    bool bare;
    part.old = part.new = same_name(without_start(line(0), strlen("diff --git ")), &bare);
    for (advance(); !at_end(); advance()) {
        if (names_follow(0)) {
            take_names(&part, bare);
            take_hunks(&part);
            break;
        }
        if (!take_extended(&part))
            break;
    }
    if (part.creates)
        part.old = NULL;
    if (part.deletes)
        part.new = NULL;
    if (!part.old && !part.new)
        wrong(part.at_line, "this part does not name a file");
    if (!part.hunks && !part.creates && !part.deletes && !part.renames && !part.copies && part.mode < 0)
        wrong(part.at_line, "this part of the patch changes nothing");
    return part;
}

static struct part take_plain_part(void) {
    struct part part = {.at_line = line_number, .mode = -1};
    take_names(&part, false);
    take_hunks(&part);
    return part;
}

void parse_patch(struct patch *into, int strip_parts) {
    patch = into, strip = strip_parts;
    for (advance(); !at_end();) {
        bool git = begins_with(line(0), "diff --git ");
        if (!git && !names_follow(0)) {
            if (begins_with(line(0), "@@ -"))
                wrong(line_number, "a hunk comes before any '--- old' and '+++ new' lines that name its file");
            advance();
            continue;
        }
        patch->parts = with_room(patch->parts, patch->part_count, sizeof *patch->parts);
        struct part part = git ? take_git_part() : take_plain_part();
        patch->parts[patch->part_count++] = part;
        if (patch->part_count > MAX_PARTS)
            wrong(line_number, "the patch changes more than 500 files");
    }
    if (!patch->part_count) {
        struct text text = {0};
        addf(&text, "no file names: a unified diff has '--- old' and '+++ new' lines, then '@@' hunks");
        explain(NO_PATCH, &text);
    }
}
