/* Making a child's descriptors. See ends.h. */
#define _GNU_SOURCE
#include "ends.h"

#include "packets.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

void close_all(int *fds, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

/* Replaces a regular file that the server sent (input, a script) by a copy in the slot's own memory. So a file that
 * a process of the slot keeps open is the slot's, and none is open both there and in the server: whoever has a file
 * open can hold its locks. Leaves anything else as it is. Returns an errno or 0. */
static int own_file(int *fd) {
    struct stat found;
    if (*fd < 0 || fstat(*fd, &found) < 0 || !S_ISREG(found.st_mode))
        return 0;
    int copy = memfd_create("input", MFD_CLOEXEC), error = 0;
    if (copy < 0)
        return errno;
    for (off_t at = 0; at < found.st_size && !error;)
        if (sendfile(copy, *fd, &at, (size_t)(found.st_size - at)) <= 0)
            error = errno ? errno : EIO;
    if (lseek(copy, 0, SEEK_SET) < 0)
        error = errno;
    close(*fd);
    *fd = copy;
    return error;
}

/* A terminal of the slot's own: our side in *ours, the child's as those of from[0..2] that hold nothing yet. Returns an
 * errno or 0. */
static int make_terminal(int from[4], int *ours) {
    int unlocked = 0;
    *ours = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*ours < 0 || ioctl(*ours, TIOCSPTLCK, &unlocked) < 0)
        return errno;
    int theirs = ioctl(*ours, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (theirs < 0)
        return errno;
    from[1] = theirs;
    from[2] = fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    if (from[0] < 0)
        from[0] = fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    return from[0] < 0 || from[2] < 0 ? errno : 0;
}

/* Output, errors and, if requested, the script: a pipe each for the child, a socket each for the server. */
static int make_streams(bool script, struct relay *relay, struct ends *ends) {
    int error = make_stream(relay, OUT, &ends->server[0], &ends->child[1]);
    if (!error)
        error = make_stream(relay, ERR, &ends->server[1], &ends->child[2]);
    if (!error && script)
        error = make_stream(relay, SCRIPT, &ends->server[2], &ends->child[3]);
    return error;
}

static bool is_socket(int fd) {
    struct stat found;
    return fd >= 0 && !fstat(fd, &found) && S_ISSOCK(found.st_mode);
}

/* Puts a pipe in the place of a socket of the server's. */
static int join(struct relay *relay, enum stream_name name, int *end) {
    int sock = *end;
    *end = -1;
    return join_stream(relay, name, sock, end);
}

/* What the server has attached: a socket that the child reads or answers over becomes a pipe, a file a copy. */
static int take_attached(int flags, struct relay *relay, int from[4]) {
    int error = is_socket(from[0]) ? join(relay, INPUT, &from[0]) : own_file(&from[0]);
    if (error)
        return error;
    return flags & WITH_ANSWERS ? join(relay, ANSWERS, &from[3]) : own_file(&from[3]);
}

int make_ends(int flags, struct relay *relay, struct ends *ends) {
    int *from = ends->child, error = take_attached(flags, relay, from);
    if (error)
        return error;
    if (flags & TERMINAL)
        return make_terminal(from, &ends->server[0]);
    if (from[0] < 0 && (from[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
        return errno;
    return make_streams(flags & SCRIPT_PIPE, relay, ends);
}
