/* Runs of ripgrep. See ripgrep.h. */
#define _GNU_SOURCE
#include "ripgrep.h"

#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

void start_ripgrep(struct ripgrep *run, const char *const argv[], int directory) {
    static char *const environment[] = {NULL};
    int input[2], output[2];
    posix_spawn_file_actions_t actions;
    run->errors = memfd_create("errors", MFD_CLOEXEC);
    if (run->errors < 0 || pipe2(input, O_CLOEXEC) || pipe2(output, O_CLOEXEC))
        fail(errno);
    int error = posix_spawn_file_actions_init(&actions);
    error = error ? error : posix_spawn_file_actions_addfchdir_np(&actions, directory);
    error = error ? error : posix_spawn_file_actions_adddup2(&actions, input[0], 0);
    error = error ? error : posix_spawn_file_actions_adddup2(&actions, output[1], 1);
    error = error ? error : posix_spawn_file_actions_adddup2(&actions, run->errors, 2);
    error = error ? error : posix_spawn(&run->pid, argv[0], &actions, NULL, (char *const *)argv, environment);
    if (error)
        fail(error == ENOENT ? NO_RIPGREP : error);
    posix_spawn_file_actions_destroy(&actions);
    close(input[0]), close(output[1]);
    run->input = input[1], run->output = output[0];
    if (fcntl(run->input, F_SETFL, O_NONBLOCK))
        fail(errno);
    signal(SIGPIPE, SIG_IGN); /* it may end before it has read everything: end_ripgrep knows why */
}

int end_ripgrep(struct ripgrep *run, bool stopped) {
    int status;
    if (stopped)
        kill(run->pid, SIGKILL);
    close(run->input), close(run->output);
    while (waitpid(run->pid, &status, 0) < 0)
        if (errno != EINTR)
            fail(errno);
    if (WIFEXITED(status) || stopped)
        return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    signal(WTERMSIG(status), SIG_DFL); /* the call ends as the program did, which did its work */
    raise(WTERMSIG(status));
    fail(EIO);
}

char *ripgrep_errors(const struct ripgrep *run, size_t *bytes) {
    struct stat found;
    if (fstat(run->errors, &found))
        fail(errno);
    char *text = malloc((size_t)found.st_size + 1);
    ssize_t got = text ? pread(run->errors, text, (size_t)found.st_size, 0) : -1;
    if (got < 0)
        fail(text ? errno : ENOMEM);
    *bytes = (size_t)got;
    text[got] = 0;
    return text;
}
