/* Starting a process of a run: vfork, and what the child does until its exec. See slotagent.h. */
#define _GNU_SOURCE
#include "slotagent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile int child_errno, child_step; /* written by a vforked child, which shares our memory */

/* Tries `program` in each directory of PATH, as execvpe does, without its heap and without its
 * fallback to a shell. Returns only on failure, with errno set. */
static void exec_program(const char *program, char *const *argv, char *const *env) {
    static char path[MAX_PACKET + 512];
    if (strchr(program, '/')) {
        execve(program, argv, env);
        return;
    }
    const char *dirs = "/usr/local/bin:/usr/bin:/bin";
    for (char *const *entry = env; *entry; entry++)
        if (!strncmp(*entry, "PATH=", 5))
            dirs = *entry + 5;
    int denied = 0;
    errno = ENOENT;
    for (const char *dir = dirs; *program; dir++) {
        size_t bytes = strcspn(dir, ":"), name = strlen(program);
        if (bytes + name + 2 <= sizeof path) {
            memcpy(path, dir, bytes);
            path[bytes] = '/';
            memcpy(path + bytes + 1, program, name + 1);
            execve(bytes ? path : program, argv, env); /* an empty entry means the current directory */
        }
        denied |= errno == EACCES;
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES && errno != ENAMETOOLONG)
            return;
        dir += bytes;
        if (!*dir)
            break;
    }
    errno = denied ? EACCES : ENOENT;
}

/* In the vforked child: our memory is the parent's, which sleeps until the exec. Writes only locals,
 * `path` above, child_errno and child_step. `from` is what becomes 0, 1, 2 and (or -1) 9. */
static _Noreturn void child(const char *cwd, const char *program, char *const *argv, char *const *env, const int from[4],
                            bool terminal) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    child_step = STEP_RESOURCES;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(from[fd], fd) < 0)
            goto failed;
    if (terminal && ioctl(1, TIOCSCTTY, 0) < 0)
        goto failed;
    unsigned first = 3;
    if (from[3] >= 0) {
        /* dup2 onto itself would keep close-on-exec. */
        if (from[3] == SCRIPT_DESCRIPTOR ? fcntl(SCRIPT_DESCRIPTOR, F_SETFD, 0) : dup2(from[3], SCRIPT_DESCRIPTOR) < 0)
            goto failed;
        syscall(SYS_close_range, 3U, (unsigned)SCRIPT_DESCRIPTOR - 1, 0U);
        first = SCRIPT_DESCRIPTOR + 1;
    }
    syscall(SYS_close_range, first, ~0U, 0U); /* everything is close-on-exec as well: this is the belt */
    child_step = STEP_CWD;
    if (chdir(cwd) < 0)
        goto failed;
    child_step = STEP_EXEC;
    sigprocmask(SIG_SETMASK, &none, NULL);
    exec_program(program, argv, env);
failed:
    child_errno = errno;
    _exit(127);
}

/* Nothing of ours that changes may live in a register across vfork: hence the volatile statics. */
pid_t start_child(const char *cwd, const char *program, char *const *argv, char *const *env, const int *from,
                  bool terminal, int *error, int *step) {
    child_errno = 0;
    child_step = STEP_RESOURCES;
    pid_t pid = vfork();
    if (!pid)
        child(cwd, program, argv, env, from, terminal);
    if (pid < 0)
        child_errno = errno;
    else if (child_errno)
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
    *error = child_errno;
    *step = child_step;
    return child_errno ? -1 : pid;
}
