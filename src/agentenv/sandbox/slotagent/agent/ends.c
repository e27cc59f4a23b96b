/* What a run's descriptors 0, 1, 2 (and 9) may be besides pipes: files in memory, or a terminal. See slotagent.h. */
#define _GNU_SOURCE
#include "slotagent.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

int own_file(int *fd) {
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

int make_terminal(int from[4], int *ours) {
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
