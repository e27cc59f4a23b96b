/* Steps of a slot's first process between fork and exec, shared by the programs that take them. Each ends the process
 * with a message on stderr and exit code 127 when it fails. */
#pragma once

#include <sys/types.h>

/* The name with which messages begin. */
void call_program(const char *name);

_Noreturn void fail(const char *what, const char *which);

/* Ends the process with this exit code and a message of two parts. */
_Noreturn void leave(int exit_code, const char *what, const char *which);

unsigned long number(const char *text);

/* Writes `text` to an existing file. */
void put(const char *what, const char *file, const char *text);

/* Lowers this rlimit, soft and hard, to at most `value`. */
void lower_limit(const char *resource, const char *value);

/* Gives up all groups, then becomes the user and the group. */
void become(const char *uid, const char *gid);

/* As become(), with one right kept until the user namespace is made that it is for: to make one also where a setting
 * (kernel.unprivileged_userns_clone) or a security module (AppArmor's kernel.apparmor_restrict_unprivileged_userns)
 * refuses that to those without rights. `others` are the bits of further capabilities below 32 to keep. */
void become_maker(const char *uid, const char *gid, unsigned others);

/* Becomes UID, the owner of the user namespace of this descriptor, which is closed, and then root inside it. */
void join_user_namespace(const char *uid, int namespace);

/* Leaves the session keyring of the supervisor's starter, for a new one, empty and nameless. */
void leave_keyring(void);

/* Applies one option: -j FILE, -l RESOURCE VALUE or -o SCORE (see launch/main.c). Returns how many arguments it
 * took; 0 when it is none of these. */
int take_common_option(char **arguments, int left);
