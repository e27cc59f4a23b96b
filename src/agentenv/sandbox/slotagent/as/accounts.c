/* See accounts.h. */
#include "accounts.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FIELDS = 7, USER_FIELDS = 7, GROUP_FIELDS = 4 };

struct table parse_lines(char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (text[i] == '\n')
            text[i] = '\0';
    return (struct table){text, bytes};
}

struct table read_table(const char *path) {
    static const struct table none = {NULL, 0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hold us up */
    if (fd < 0)
        return none;
    char *text = malloc(MAX_FILE_BYTES + 1);
    size_t bytes = 0;
    ssize_t got = 1;
    while (text && got > 0 && bytes < MAX_FILE_BYTES) {
        got = read(fd, text + bytes, MAX_FILE_BYTES - bytes);
        bytes += got > 0 ? (size_t)got : 0;
    }
    close(fd);
    if (!text)
        return none;
    text[bytes] = '\0';
    return parse_lines(text, bytes);
}

/* A decimal number that is an id. The highest one means "unchanged" to the kernel. */
static bool parse_id(const char *text, unsigned *id) {
    uint64_t value = 0;
    if (!*text)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return false;
        value = value * 10 + (uint64_t)(*text - '0');
        if (value >= UINT32_MAX)
            return false;
    }
    *id = (unsigned)value;
    return true;
}

/* Cuts a line at its colons. Returns whether it has as many fields as it must have; the last one takes the rest. */
static bool cut(char *line, char *fields[], size_t wanted) {
    size_t found = 0;
    for (;;) {
        fields[found++] = line;
        char *colon = found < wanted ? strchr(line, ':') : NULL;
        if (!colon)
            return found == wanted;
        *colon = '\0';
        line = colon + 1;
    }
}

/* The next line that has these fields, from *at on; false at the end. */
static bool next_entry(struct table table, size_t *at, char *fields[], size_t wanted) {
    while (*at < table.bytes) {
        char *line = table.text + *at;
        *at += strlen(line) + 1;
        if (cut(line, fields, wanted) && *fields[0])
            return true;
    }
    return false;
}

static void take_user(struct account *account, char *const fields[], unsigned uid, unsigned gid) {
    account->uid = uid;
    account->gid = gid;
    account->name = fields[0];
    account->home = *fields[5] ? fields[5] : "/";
}

bool find_user(struct table users, const char *wanted, struct account *account) {
    char *fields[MAX_FIELDS];
    unsigned number = 0, uid, gid;
    size_t at = 0;
    bool numeric = parse_id(wanted, &number), found = false;
    while (next_entry(users, &at, fields, USER_FIELDS)) {
        if (!parse_id(fields[2], &uid) || !parse_id(fields[3], &gid))
            continue;
        if (strcmp(fields[0], wanted) == 0) {
            take_user(account, fields, uid, gid);
            return true;
        }
        if (numeric && !found && uid == number) {
            take_user(account, fields, uid, gid);
            found = true;
        }
    }
    if (!found && numeric) {
        account->uid = number;
        account->gid = 0;
        account->name = NULL;
        account->home = "/";
    }
    return numeric;
}

bool find_group(struct table groups, const char *wanted, struct account *account) {
    char *fields[MAX_FIELDS];
    unsigned gid;
    size_t at = 0;
    while (next_entry(groups, &at, fields, GROUP_FIELDS))
        if (strcmp(fields[0], wanted) == 0 && parse_id(fields[2], &gid)) {
            account->gid = gid;
            return true;
        }
    if (!parse_id(wanted, &gid))
        return false;
    account->gid = gid;
    return true;
}

static bool has_member(const char *members, const char *name) {
    size_t bytes = strlen(name);
    while (*members) {
        size_t length = strcspn(members, ",");
        if (length == bytes && strncmp(members, name, bytes) == 0)
            return true;
        members += length + (members[length] == ',');
    }
    return false;
}

void find_memberships(struct table groups, struct account *account) {
    char *fields[MAX_FIELDS];
    unsigned gid;
    size_t at = 0;
    if (!account->name)
        return;
    while (account->group_count < MAX_GROUPS && next_entry(groups, &at, fields, GROUP_FIELDS))
        if (parse_id(fields[2], &gid) && has_member(fields[3], account->name))
            account->groups[account->group_count++] = gid;
}
