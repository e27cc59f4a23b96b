/* Starting a process, and what the child does until its exec. See child.h. */
#define _GNU_SOURCE
#include "child.h"

#include "packets.h"
#include "proc.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILD_STACK_BYTES = 32 * 1024, PATIENCE_MS = 10, SCRIPT_DESCRIPTOR = 9 };
enum { CLOEXEC_RANGE = 4 /* CLOSE_RANGE_CLOEXEC */ };

/* AddressSanitizer would leave the marks it makes for the child's frames on a stack that is ours again afterwards. */
#define ON_CHILD_STACK __attribute__((no_sanitize_address))

static volatile int child_errno, child_step; /* written by the child, which shares our memory until its exec */

/* Tries `program` in each directory of PATH, as execvpe does, but without a heap and without falling back to a shell.
 * Returns only on failure, with errno set. */
ON_CHILD_STACK static void exec_program(const char *program, char *const *argv, char *const *env) {
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

/* In the child, whose memory is also the parent's; the parent waits for the exec. Writes only locals, `path` above,
 * child_errno and child_step. */
ON_CHILD_STACK static int child(void *argument) {
    const struct beginning *the = argument;
    const int *from = the->from;
    sigset_t none;
    sigemptyset(&none);
    setsid();
    child_step = STEP_RESOURCES;
    for (int fd = 0; fd < 3; fd++) /* none of from[] is below 3: the agent keeps those taken */
        if (dup2(from[fd], fd) < 0)
            goto failed;
    if (the->terminal && ioctl(1, TIOCSCTTY, 0) < 0)
        goto failed;
    unsigned first = 3;
    if (from[3] >= 0) {
        /* dup2 onto the same descriptor would leave it close-on-exec. */
        if (from[3] == SCRIPT_DESCRIPTOR ? fcntl(SCRIPT_DESCRIPTOR, F_SETFD, 0) : dup2(from[3], SCRIPT_DESCRIPTOR) < 0)
            goto failed;
        syscall(SYS_close_range, 3U, (unsigned)SCRIPT_DESCRIPTOR - 1, (unsigned)CLOEXEC_RANGE);
        first = SCRIPT_DESCRIPTOR + 1;
    }
    /* Everything was opened close-on-exec; this makes sure. It does not close anything yet, because the parent waits
     * for one of them to be closed by the exec. */
    syscall(SYS_close_range, first, ~0U, (unsigned)CLOEXEC_RANGE);
    child_step = STEP_CWD;
    if (chdir(the->cwd) < 0)
        goto failed;
    child_step = STEP_EXEC;
    sigprocmask(SIG_SETMASK, &none, NULL);
    exec_program(the->program, the->argv, the->env);
failed:
    child_errno = errno;
    _exit(127);
}

/* Waits until the child has executed its program, or ended: then nothing holds the write end of `executed` any more.
 * A process of the slot may stop the child before that, even again and again. Then all others are stopped for the
 * moment in which the child continues. */
static void wait_for_exec(pid_t pid, int executed) {
    struct pollfd end = {.fd = executed};
    while (!poll(&end, 1, PATIENCE_MS))
        if (is_stopped(pid)) {
            freeze_slot();
            kill(pid, SIGCONT);
        }
    thaw_slot();
}

/* Makes the two ends of a pipe by which an exec is noticed. The second is above the script's descriptor, where the
 * child puts something else. Returns 0 or an errno. */
static int make_exec_pipe(int ends[2]) {
    if (pipe2(ends, O_CLOEXEC) < 0)
        return errno;
    int high = fcntl(ends[1], F_DUPFD_CLOEXEC, SCRIPT_DESCRIPTOR + 1), error = errno;
    close(ends[1]);
    ends[1] = high;
    if (high >= 0)
        return 0;
    close(ends[0]);
    return error;
}

/* Shares memory like vfork (no copy of our page tables), but is not vfork: that would hold up the parent for as long
 * as another process keeps the child stopped. The child's stack is a part of ours. */
pid_t start_child(const struct beginning *beginning, int *error, int *step) {
    _Alignas(16) char stack[CHILD_STACK_BYTES];
    int ends[2];
    *step = STEP_RESOURCES;
    *error = make_exec_pipe(ends);
    if (*error)
        return -1;
    child_errno = 0;
    child_step = STEP_RESOURCES;
    pid_t pid = clone(child, stack + sizeof stack, CLONE_VM | SIGCHLD, (void *)(uintptr_t)beginning);
    if (pid < 0)
        child_errno = errno;
    close(ends[1]);
    if (pid >= 0)
        wait_for_exec(pid, ends[0]);
    close(ends[0]);
    if (pid >= 0 && child_errno)
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
    *error = child_errno;
    *step = child_step;
    return child_errno ? -1 : pid;
}
