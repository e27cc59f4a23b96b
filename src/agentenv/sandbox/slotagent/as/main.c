/* slotas: runs a program as a user of an image slot.
 *
 *   slotas [-x FILE] USER[:GROUP] PROGRAM ARG...
 *
 * USER and GROUP are names of the slot's own /etc/passwd and /etc/group, or numbers (accounts.h). It becomes that user,
 * with the user's supplementary groups, sets HOME, USER and LOGNAME where the environment has none, gives the user the
 * pipes, sockets, terminals and files in memory it was started with (as runc does: /dev/stdout could not be opened
 * otherwise), and executes PROGRAM, found by PATH. With -x it executes FILE, which sees PROGRAM as its name.
 *
 * It is started by the agent as the slot's root, and has no rights that this has not. Static, without NSS: it works in
 * any root. Failures are printed to stderr, with these exit codes:
 *
 *   125  something failed before PROGRAM     126  PROGRAM cannot be executed     127  PROGRAM is not found
 *   210  there is no such user     211  there is no such group (no code of slotfiles, whatever PROGRAM is)
 */
#define _GNU_SOURCE
#include "accounts.h"
#include "steps.h"

#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FAILED = 125, NOT_EXECUTABLE = 126, NOT_FOUND = 127, NO_USER = 210, NO_GROUP = 211, MAX_NAME = 256 };

static const int STREAMS[] = {0, 1, 2, 9}; /* 9: the script of a shell (child.h) */

static void find_account(const char *wanted, struct account *account) {
    char user[MAX_NAME + 1];
    const char *colon = strchr(wanted, ':'), *group = colon ? colon + 1 : NULL;
    size_t bytes = colon ? (size_t)(colon - wanted) : strlen(wanted);
    if (bytes > MAX_NAME || (group && !*group))
        leave(FAILED, "not a valid user name", wanted);
    memcpy(user, wanted, bytes);
    user[bytes] = '\0';
    if (!find_user(read_table("/etc/passwd"), *user ? user : "0", account))
        leave(NO_USER, "no such user", user);
    struct table groups = read_table("/etc/group");
    if (!group)
        find_memberships(groups, account);
    else if (!find_group(groups, group, account))
        leave(NO_GROUP, "no such group", group);
}

static void hand_over_streams(const struct account *account) {
    struct stat about;
    for (size_t i = 0; i < sizeof STREAMS / sizeof *STREAMS; i++) {
        int fd = STREAMS[i];
        if (fstat(fd, &about) < 0)
            continue;
        bool file_in_memory = S_ISREG(about.st_mode) && about.st_nlink == 0;
        if (file_in_memory || S_ISFIFO(about.st_mode) || S_ISSOCK(about.st_mode) || isatty(fd))
            if (fchown(fd, account->uid, (gid_t)-1) < 0 && errno != EPERM && errno != EINVAL)
                leave(FAILED, "cannot change the owner of a stream", strerror(errno));
    }
}

static void become_user(const struct account *account) {
    uid_t uid = account->uid;
    gid_t gid = account->gid;
    if (setgroups(account->group_count, account->groups) < 0 || setresgid(gid, gid, gid) < 0 ||
        setresuid(uid, uid, uid) < 0)
        leave(FAILED, "cannot become this user",
              errno == EINVAL ? "the slot does not map all of its ids (docs/images.md)" : strerror(errno));
}

static void set_environment(const struct account *account) {
    int failed = setenv("HOME", account->home, 0);
    if (account->name)
        failed |= setenv("USER", account->name, 0) | setenv("LOGNAME", account->name, 0);
    if (failed)
        leave(FAILED, "cannot set the environment", strerror(errno));
}

int main(int argc, char **argv) {
    static struct account account;
    const char *file = NULL;
    int at = 1;
    call_program("slotas");
    if (argc > 2 && strcmp(argv[1], "-x") == 0) {
        file = argv[2];
        at = 3;
    }
    if (at + 1 >= argc)
        leave(FAILED, "usage", "slotas [-x FILE] USER[:GROUP] PROGRAM ARG...");
    find_account(argv[at], &account);
    hand_over_streams(&account);
    become_user(&account);
    set_environment(&account);
    char **program = argv + at + 1;
    execvp(file ? file : *program, program);
    leave(errno == ENOENT ? NOT_FOUND : NOT_EXECUTABLE, *program, strerror(errno));
}
