/* See unpack.h. Formats: ustar, pax (POSIX.1-2017), GNU long names and numbers. */
#define _GNU_SOURCE
#include "unpack.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { BLOCK = 512, CHUNK = 128 * 1024, RECORDS_BYTES = 1024 * 1024, PATH_BYTES = 8192, MAX_ATTRIBUTES = 10000 };

struct attribute {
    const char *name, *value;
    size_t bytes;
};

struct entry {
    char type, path[PATH_BYTES], link[PATH_BYTES];
    mode_t mode;
    uid_t uid;
    gid_t gid;
    uint64_t size;
    struct timespec accessed, modified;
    bool sparse;
    uint64_t real_size, device; /* 0: the device that stands for none, which everybody may make */
};

/* Directories whose times and default ACLs are set at the end, because of what is put into them: it changes the former,
 * and would inherit the latter. */
struct dated {
    char *path;
    struct timespec times[2];
    struct attribute inherited;
};

#define INHERITED "system.posix_acl_default"

static struct dated *dated;
static size_t dated_count, dated_room;
static int base;
static struct entry entry;
static struct attribute attributes[MAX_ATTRIBUTES]; /* of the entry; they lie in its records */
static size_t attribute_count;

static _Noreturn void give_up(int error) {
    size_t bytes = strlen(entry.path);
    (void)!write(1, entry.path, bytes);
    _exit(error > 0 && error < 128 ? error : EIO);
}

static void check(int result) {
    if (result < 0)
        give_up(errno);
}

/* ---- input ---- */

static void take(void *into, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(0, (char *)into + done, bytes - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            give_up(got < 0 ? errno : EPIPE);
        done += (size_t)got;
    }
}

static void skip_padding(uint64_t size) {
    char rest[BLOCK];
    take(rest, (size_t)((BLOCK - size % BLOCK) % BLOCK));
}

/* Octal, or base 256 if the first bit is set (GNU). */
static uint64_t parse_number(const char *field, size_t bytes) {
    uint64_t value = 0;
    if ((unsigned char)*field & 0x80) {
        for (size_t i = bytes > 8 ? bytes - 8 : 1; i < bytes; i++)
            value = value << 8 | (unsigned char)field[i];
        return value;
    }
    size_t i = 0;
    while (i < bytes && field[i] == ' ')
        i++;
    for (; i < bytes && field[i] >= '0' && field[i] <= '7'; i++)
        value = value * 8 + (uint64_t)(field[i] - '0');
    if (i < bytes && field[i] && field[i] != ' ')
        give_up(EINVAL);
    return value;
}

static void copy_text(char *to, const char *from, size_t bytes) {
    if (bytes >= PATH_BYTES)
        give_up(ENAMETOOLONG);
    if (memchr(from, 0, bytes))
        bytes = strnlen(from, bytes);
    memcpy(to, from, bytes);
    to[bytes] = 0;
}

/* ---- extended headers ---- */

struct extras {
    bool has_path, has_link, has_size, has_uid, has_gid, has_time, has_access, sparse;
    char path[PATH_BYTES], link[PATH_BYTES];
    uint64_t size, uid, gid, real_size;
    struct timespec accessed, modified;
};

static struct extras extras;
static char records[RECORDS_BYTES + 1];

static struct timespec parse_time(const char *text) {
    char *end;
    struct timespec moment = {strtoll(text, &end, 10), 0};
    if (*end == '.') {
        long scale = 100000000;
        for (const char *digit = end + 1; *digit >= '0' && *digit <= '9' && scale; digit++, scale /= 10)
            moment.tv_nsec += (*digit - '0') * scale;
    }
    if (*text == '-' && moment.tv_nsec) /* -0.25 is 0.75 after -1 */
        moment.tv_sec--, moment.tv_nsec = 1000000000 - moment.tv_nsec;
    return moment;
}

static void take_record(char *key, char *value, size_t bytes) {
    if (!strcmp(key, "path"))
        extras.has_path = true, copy_text(extras.path, value, bytes);
    else if (!strcmp(key, "linkpath"))
        extras.has_link = true, copy_text(extras.link, value, bytes);
    else if (!strcmp(key, "size"))
        extras.has_size = true, extras.size = strtoull(value, NULL, 10);
    else if (!strcmp(key, "uid"))
        extras.has_uid = true, extras.uid = strtoull(value, NULL, 10);
    else if (!strcmp(key, "gid"))
        extras.has_gid = true, extras.gid = strtoull(value, NULL, 10);
    else if (!strcmp(key, "mtime"))
        extras.has_time = true, extras.modified = parse_time(value);
    else if (!strcmp(key, "atime"))
        extras.has_access = true, extras.accessed = parse_time(value);
    else if (!strcmp(key, "GNU.sparse.major"))
        extras.sparse = !strcmp(value, "1");
    else if (!strcmp(key, "GNU.sparse.name"))
        extras.has_path = true, copy_text(extras.path, value, bytes);
    else if (!strcmp(key, "GNU.sparse.realsize"))
        extras.real_size = strtoull(value, NULL, 10);
    else if (!strncmp(key, "SCHILY.xattr.", 13)) {
        if (attribute_count == MAX_ATTRIBUTES)
            give_up(E2BIG);
        attributes[attribute_count++] = (struct attribute){key + 13, value, bytes};
    }
}

/* "LENGTH key=value\n" one after the other. They stay in `records`, cut in place. */
static void take_records(uint64_t size) {
    if (size > RECORDS_BYTES)
        give_up(E2BIG);
    take(records, (size_t)size);
    records[size] = 0;
    for (char *at = records, *end = records + size; at < end;) {
        char *space;
        size_t length = strtoull(at, &space, 10);
        if (*space != ' ' || length > (size_t)(end - at) || length < (size_t)(space - at) + 3 || at[length - 1] != '\n')
            give_up(EINVAL);
        char *key = space + 1, *equals = memchr(key, '=', (size_t)(at + length - key));
        if (!equals)
            give_up(EINVAL);
        *equals = 0;
        at[length - 1] = 0;
        take_record(key, equals + 1, (size_t)(at + length - 1 - (equals + 1)));
        at += length;
    }
    skip_padding(size);
}

static void take_long(char *into, bool *has, uint64_t size) {
    if (size >= PATH_BYTES)
        give_up(ENAMETOOLONG);
    take(into, (size_t)size);
    into[size] = 0;
    *has = true;
    skip_padding(size);
}

/* ---- headers ---- */

/* False at the end of the archive. */
static bool take_header(char *header) {
    take(header, BLOCK);
    bool empty = true;
    for (int i = 0; i < BLOCK && empty; i++)
        empty = !header[i];
    if (empty)
        return false;
    unsigned sum = 0;
    for (int i = 0; i < BLOCK; i++)
        sum += i >= 148 && i < 156 ? ' ' : (unsigned char)header[i];
    if (sum != parse_number(header + 148, 8))
        give_up(EINVAL);
    return true;
}

static void take_names(const char *header) {
    size_t name = strnlen(header, 100), prefix = memcmp(header + 257, "ustar", 6) ? 0 : strnlen(header + 345, 155);
    if (prefix) {
        copy_text(entry.path, header + 345, prefix);
        entry.path[prefix++] = '/';
    }
    memcpy(entry.path + prefix, header, name);
    entry.path[prefix + name] = 0;
    copy_text(entry.link, header + 157, strnlen(header + 157, 100));
}

/* The next entry, with what the headers before it say. False at the end. */
static bool next_entry(void) {
    char header[BLOCK];
    memset(&extras, 0, sizeof extras);
    attribute_count = 0;
    for (;;) {
        if (!take_header(header))
            return false;
        uint64_t size = parse_number(header + 124, 12);
        if (header[156] == 'x')
            take_records(size);
        else if (header[156] == 'L')
            take_long(extras.path, &extras.has_path, size);
        else if (header[156] == 'K')
            take_long(extras.link, &extras.has_link, size);
        else
            break;
    }
    take_names(header);
    entry.type = header[156] ? header[156] : '0';
    entry.mode = (mode_t)parse_number(header + 100, 8) & 07777;
    entry.uid = (uid_t)(extras.has_uid ? extras.uid : parse_number(header + 108, 8));
    entry.gid = (gid_t)(extras.has_gid ? extras.gid : parse_number(header + 116, 8));
    entry.size = extras.has_size ? extras.size : parse_number(header + 124, 12);
    entry.modified = extras.has_time ? extras.modified : (struct timespec){(time_t)parse_number(header + 136, 12), 0};
    if (extras.has_path)
        strcpy(entry.path, extras.path);
    if (extras.has_link)
        strcpy(entry.link, extras.link);
    entry.accessed = extras.has_access ? extras.accessed : entry.modified;
    entry.device = entry.type == '3' ? parse_number(header + 329, 8) | parse_number(header + 337, 8) : 0;
    entry.sparse = extras.sparse;
    entry.real_size = extras.real_size;
    return true;
}

/* ---- output ---- */

/* Opens a directory below the base; no link on the way is followed, and nothing leads out. -1 on failure. */
static int find_directory(char *path) {
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    return (int)syscall(SYS_openat2, base, *path ? path : ".", &how, sizeof how);
}

static int open_directory(char *path) {
    int fd = find_directory(path);
    check(fd);
    return fd;
}

/* The same, after the directories that are missing were made: a tar need not have entries for them. They are root's, as
 * those that container engines make. */
static int make_directory(char *path) {
    int fd = find_directory(path);
    if (fd >= 0 || errno != ENOENT)
        return fd;
    fd = openat(base, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(fd);
    for (char *name = path, *slash; name; name = slash ? slash + 1 : NULL) {
        if ((slash = strchr(name, '/')))
            *slash = 0;
        if (!strcmp(name, ".."))
            give_up(EXDEV);
        if (*name && mkdirat(fd, name, 0755) < 0 && errno != EEXIST)
            give_up(errno);
        int next = openat(fd, *name ? name : ".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        check(next);
        close(fd);
        fd = next;
        if (slash)
            *slash = '/';
    }
    return fd;
}

/* Cuts `path` into the directory, which is opened by `find`, and the name in it; "" for the base itself. */
static const char *split(char *path, int find(char *), int *directory) {
    size_t bytes = strlen(path);
    while (bytes && path[bytes - 1] == '/')
        path[--bytes] = 0;
    while (path[0] == '.' && path[1] == '/')
        memmove(path, path + 2, strlen(path + 2) + 1);
    if (!strcmp(path, "."))
        path[0] = 0;
    char *slash = strrchr(path, '/');
    char *name = slash ? slash + 1 : path;
    if (!strcmp(name, "..") || path[0] == '/')
        give_up(EXDEV);
    char root[] = "";
    if (slash)
        *slash = 0;
    *directory = find(slash ? path : root);
    check(*directory);
    if (slash)
        *slash = '/';
    return name;
}

static void set_owner_and_mode(int fd) {
    check(fchown(fd, entry.uid, entry.gid));
    check(fchmod(fd, entry.mode)); /* after it: a change of owner takes setuid away */
    for (size_t i = 0; i < attribute_count; i++)
        if (strcmp(attributes[i].name, INHERITED) != 0)
            check(fsetxattr(fd, attributes[i].name, attributes[i].value, attributes[i].bytes, 0));
}

/* Where the entry is a link or a pipe: they cannot be opened. */
static void set_attributes_at(int directory, const char *name) {
    char at[320];
    snprintf(at, sizeof at, "/proc/self/fd/%d/%s", directory, name);
    for (size_t i = 0; i < attribute_count; i++)
        check(lsetxattr(at, attributes[i].name, attributes[i].value, attributes[i].bytes, 0));
}

static struct attribute inherited_attribute(void) {
    for (size_t i = 0; i < attribute_count; i++)
        if (!strcmp(attributes[i].name, INHERITED)) {
            char *value = malloc(attributes[i].bytes + 1);
            if (!value)
                give_up(ENOMEM);
            memcpy(value, attributes[i].value, attributes[i].bytes);
            return (struct attribute){INHERITED, value, attributes[i].bytes};
        }
    return (struct attribute){NULL, NULL, 0};
}

static void remember_time(const char *path) {
    if (dated_count == dated_room) {
        dated_room = dated_room ? 2 * dated_room : 256;
        dated = realloc(dated, dated_room * sizeof *dated);
    }
    char *kept = dated ? strdup(path) : NULL;
    if (!kept)
        give_up(ENOMEM);
    dated[dated_count++] = (struct dated){kept, {entry.accessed, entry.modified}, inherited_attribute()};
}

/* What is mounted there (/proc in a tar of a whole root) stays as it is. */
static void put_directory(int directory, const char *name) {
    struct stat found, root;
    if (*name && mkdirat(directory, name, 0700) < 0 && errno != EEXIST)
        give_up(errno);
    int fd = openat(directory, *name ? name : ".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    check(fd);
    check(fstat(fd, &found));
    check(fstat(base, &root));
    if (found.st_dev != root.st_dev) {
        close(fd);
        return;
    }
    set_owner_and_mode(fd);
    close(fd);
    remember_time(entry.path);
}

static void put_content(int fd, uint64_t from, uint64_t bytes) {
    static char chunk[CHUNK];
    while (bytes) {
        size_t now = bytes < CHUNK ? (size_t)bytes : CHUNK;
        take(chunk, now);
        for (size_t done = 0; done < now;) {
            ssize_t wrote = pwrite(fd, chunk + done, now - done, (off_t)(from + done));
            check((int)wrote);
            done += (size_t)wrote;
        }
        bytes -= now, from += now;
    }
}

/* The next number of a sparse file's map, whose blocks count to what is left of the entry. */
static uint64_t take_map_number(char *block, size_t *at, uint64_t *left) {
    uint64_t value = 0;
    for (int digits = 0; digits < 20; digits++) {
        if (*at == BLOCK) {
            if (*left < BLOCK)
                give_up(EINVAL);
            take(block, BLOCK);
            *at = 0, *left -= BLOCK;
        }
        char digit = block[(*at)++];
        if (digit == '\n' && digits)
            return value;
        if (digit < '0' || digit > '9')
            break;
        value = value * 10 + (uint64_t)(digit - '0');
    }
    give_up(EINVAL);
}

/* GNU's sparse format 1.0: how many parts, then each one's begin and bytes, as lines that fill whole blocks; then what is
 * in them. Nothing is written to the holes. */
static void put_sparse_content(int fd) {
    char block[BLOCK];
    size_t at = BLOCK;
    uint64_t left = entry.size, count = take_map_number(block, &at, &left);
    if (count > entry.size)
        give_up(EINVAL);
    uint64_t *map = malloc((2 * count + 1) * sizeof *map);
    if (!map)
        give_up(ENOMEM);
    for (uint64_t i = 0; i < 2 * count; i++)
        map[i] = take_map_number(block, &at, &left);
    for (uint64_t i = 0; i < count; left -= map[2 * i + 1], i++) {
        if (map[2 * i + 1] > left || map[2 * i] > entry.real_size)
            give_up(EINVAL);
        put_content(fd, map[2 * i], map[2 * i + 1]);
    }
    if (left)
        give_up(EINVAL);
    free(map);
    check(ftruncate(fd, (off_t)entry.real_size));
}

static void put_file(int directory, const char *name) {
    const struct timespec times[2] = {entry.accessed, entry.modified};
    int fd = openat(directory, name, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
    check(fd);
    if (entry.sparse)
        put_sparse_content(fd);
    else
        put_content(fd, 0, entry.size);
    skip_padding(entry.size);
    set_owner_and_mode(fd);
    check(futimens(fd, times));
    check(close(fd));
}

static void put_other(int directory, const char *name) {
    const struct timespec times[2] = {entry.accessed, entry.modified};
    if (entry.type == '1') {
        int from;
        const char *old = split(entry.link, find_directory, &from);
        check(linkat(from, old, directory, name, 0));
        close(from);
        return;
    }
    if (entry.type == '2')
        check(symlinkat(entry.link, directory, name));
    else if (entry.type == '6')
        check(mkfifoat(directory, name, entry.mode));
    else if (entry.type == '3' && !entry.device)
        check(mknodat(directory, name, S_IFCHR | entry.mode, 0));
    else
        give_up(EPERM);
    check(fchownat(directory, name, entry.uid, entry.gid, AT_SYMLINK_NOFOLLOW));
    if (entry.type != '2')
        check(fchmodat(directory, name, entry.mode, 0));
    set_attributes_at(directory, name);
    check(utimensat(directory, name, times, AT_SYMLINK_NOFOLLOW));
}

static void put_entry(void) {
    int directory;
    const char *name = split(entry.path, make_directory, &directory);
    if (entry.type == '5')
        put_directory(directory, name);
    else {
        if (!*name)
            give_up(EISDIR);
        if (unlinkat(directory, name, 0) < 0 && errno != ENOENT)
            give_up(errno);
        entry.type == '0' || entry.type == '7' ? put_file(directory, name) : put_other(directory, name);
    }
    close(directory);
}

static void make_base(const char *path, uid_t uid, gid_t gid, mode_t mode) {
    copy_text(entry.path, path, strlen(path));
    for (char *slash = entry.path + 1; slash; ) {
        slash = strchr(slash, '/');
        if (slash)
            *slash = 0;
        if (!mkdir(entry.path, 0700)) {
            check(chown(entry.path, uid, gid));
            check(chmod(entry.path, mode));
        } else if (errno != EEXIST)
            give_up(errno);
        if (slash)
            *slash++ = '/';
    }
    base = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(base);
}

void unpack(const char *path, uid_t uid, gid_t gid, mode_t mode) {
    umask(0);
    make_base(path, uid, gid, mode);
    while (next_entry())
        put_entry();
    while (dated_count) {
        const struct dated *last = &dated[--dated_count];
        int fd = open_directory(last->path);
        if (last->inherited.name)
            check(fsetxattr(fd, INHERITED, last->inherited.value, last->inherited.bytes, 0));
        check(futimens(fd, last->times));
        close(fd);
    }
    char rest[BLOCK];
    while (read(0, rest, sizeof rest) > 0) {}
}
