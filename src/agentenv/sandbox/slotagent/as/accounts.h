/* The accounts of a slot: its own /etc/passwd and /etc/group, read without NSS.
 *
 * The files are the image's or what the slot made of them. They are read whole, up to a limit, and anything in them that
 * is not a well-formed line is passed over. Names and numbers mean what they do in `docker run --user` (moby/sys/user):
 * a name wins over a number; a number need not be in the files; with a group given there are no supplementary ones. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { MAX_FILE_BYTES = 1 << 20, MAX_GROUPS = 1024 };

/* One file, each line a string. */
struct table {
    char *text;
    size_t bytes;
};

struct account {
    uid_t uid;
    gid_t gid;
    const char *name; /* NULL: a number without a line */
    const char *home;
    size_t group_count;
    gid_t groups[MAX_GROUPS];
};

/* The file in `text`, which holds `bytes`, as a table. */
struct table parse_lines(char *text, size_t bytes);

/* Reads a file; an empty table if it cannot be read. */
struct table read_table(const char *path);

/* Finds the user; cuts the tables into fields. False: there is no such user. */
bool find_user(struct table users, const char *wanted, struct account *account);

/* Finds the requested group, which is the only one then. False: there is no such group. */
bool find_group(struct table groups, const char *wanted, struct account *account);

/* Adds the groups that have the account's name as a member. */
void find_memberships(struct table groups, struct account *account);
