/* See write.h. */
#define _GNU_SOURCE
#include "write.h"

#include "steps.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { BLOCK = 512, OUT_BYTES = 256 * 1024, NUMBER_BYTES = 24 };

static char out[OUT_BYTES];
static size_t out_bytes;
static uint64_t content_bytes;

static char *records;
static size_t records_bytes, records_room;

static void flush(void) {
    for (size_t done = 0; done < out_bytes;) {
        ssize_t wrote = write(1, out + done, out_bytes - done);
        if (wrote < 0 && errno != EINTR)
            fail("write", "the archive");
        done += wrote < 0 ? 0 : (size_t)wrote;
    }
    out_bytes = 0;
}

static void put_bytes(const void *data, size_t bytes) {
    const char *from = data;
    while (bytes) {
        size_t room = OUT_BYTES - out_bytes, now = bytes < room ? bytes : room;
        memcpy(out + out_bytes, from, now);
        out_bytes += now, from += now, bytes -= now;
        if (out_bytes == OUT_BYTES)
            flush();
    }
}

static void pad(uint64_t bytes) {
    static const char zeros[BLOCK];
    put_bytes(zeros, (size_t)((BLOCK - bytes % BLOCK) % BLOCK));
}

void begin_records(void) {
    records_bytes = 0;
}

/* "LENGTH key=value\n", where the length counts itself. */
void add_record(const char *key, const void *value, size_t bytes) {
    size_t rest = strlen(key) + bytes + 3, length = rest;
    char digits[NUMBER_BYTES];
    do
        length = rest + (size_t)snprintf(digits, sizeof digits, "%zu", length);
    while (length != rest + strlen(digits) || (size_t)strtoull(digits, NULL, 10) != length);
    if (records_bytes + length > records_room) {
        records_room = 2 * (records_bytes + length);
        records = realloc(records, records_room);
        if (!records)
            fail("allocate", "records");
    }
    char *at = records + records_bytes;
    at += sprintf(at, "%s %s=", digits, key);
    memcpy(at, value, bytes);
    at[bytes] = '\n';
    records_bytes += length;
}

static void octal(char *field, size_t size, uint64_t value) {
    if (size <= 8 ? value > 07777777 : value > 077777777777)
        value = 0; /* a record has it */
    snprintf(field, size, "%0*llo", (int)size - 1, (unsigned long long)value);
}

struct header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[6], version[2];
    char user[32], group[32], major[8], minor[8], prefix[155], rest[12];
};
_Static_assert(sizeof(struct header) == BLOCK, "a header is a block");

static void put_header(const char *name, char type, uint64_t size, const struct stat *found, const char *link) {
    struct header header;
    memset(&header, 0, sizeof header);
    memcpy(header.name, name, strnlen(name, sizeof header.name));
    memcpy(header.link, link, strnlen(link, sizeof header.link));
    octal(header.mode, sizeof header.mode, found->st_mode & 07777);
    octal(header.uid, sizeof header.uid, found->st_uid);
    octal(header.gid, sizeof header.gid, found->st_gid);
    octal(header.size, sizeof header.size, size);
    octal(header.mtime, sizeof header.mtime, found->st_mtim.tv_sec < 0 ? 0 : (uint64_t)found->st_mtim.tv_sec);
    if (type == '3' || type == '4') {
        octal(header.major, sizeof header.major, major(found->st_rdev));
        octal(header.minor, sizeof header.minor, minor(found->st_rdev));
    }
    header.type = type;
    memcpy(header.magic, "ustar", 6);
    memcpy(header.version, "00", 2);
    memset(header.checksum, ' ', sizeof header.checksum);
    unsigned sum = 0;
    for (size_t i = 0; i < BLOCK; i++)
        sum += ((const unsigned char *)&header)[i];
    snprintf(header.checksum, sizeof header.checksum, "%06o", sum);
    put_bytes(&header, sizeof header);
}

static void add_number(const char *key, uint64_t value) {
    char digits[NUMBER_BYTES];
    add_record(key, digits, (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)value));
}

void add_time(const char *key, const struct timespec *moment) {
    char text[2 * NUMBER_BYTES];
    long long seconds = moment->tv_sec;
    long fraction = moment->tv_nsec;
    bool before_1970 = seconds < 0;
    if (before_1970 && fraction) /* the kernel counts nanoseconds upwards, but the digits are those of one number */
        seconds++, fraction = 1000000000 - fraction;
    int bytes = snprintf(text, sizeof text, "%s%lld.%09ld", before_1970 ? "-" : "", before_1970 ? -seconds : seconds, fraction);
    add_record(key, text, (size_t)bytes);
}

void write_header(const char *path, char type, const struct stat *found, const char *link) {
    uint64_t size = type == '0' ? (uint64_t)found->st_size : 0;
    add_time("mtime", &found->st_mtim);
    if (strlen(path) > 100)
        add_record("path", path, strlen(path));
    if (strlen(link) > 100)
        add_record("linkpath", link, strlen(link));
    if (size > 077777777777)
        add_number("size", size);
    struct stat extended = {.st_mode = 0644};
    put_header("pax", 'x', records_bytes, &extended, "");
    put_bytes(records, records_bytes);
    pad(records_bytes);
    records_bytes = 0;
    put_header(path, type, size, found, link);
    content_bytes = 0;
}

/* The format: https://www.gnu.org/software/tar/manual/html_section/Sparse-Formats.html */
void write_sparse_header(const char *path, const struct stat *found, const struct extent *extents, size_t count) {
    size_t map_bytes = 0;
    char *map = malloc((2 * count + 1) * NUMBER_BYTES);
    if (!map)
        fail("allocate", "holes");
    struct stat stored = *found;
    map_bytes += (size_t)sprintf(map, "%zu\n", count);
    stored.st_size = 0;
    for (size_t i = 0; i < count; i++) {
        long long from = extents[i].from, bytes = extents[i].bytes;
        map_bytes += (size_t)sprintf(map + map_bytes, "%lld\n%lld\n", from, bytes);
        stored.st_size += extents[i].bytes;
    }
    stored.st_size += (off_t)((map_bytes + BLOCK - 1) / BLOCK * BLOCK);
    add_number("GNU.sparse.major", 1);
    add_number("GNU.sparse.minor", 0);
    add_record("GNU.sparse.name", path, strlen(path));
    add_number("GNU.sparse.realsize", (uint64_t)found->st_size);
    write_header(path, '0', &stored, "");
    write_content(map, map_bytes);
    end_content();
    content_bytes = 0;
    free(map);
}

void write_content(const void *data, size_t bytes) {
    put_bytes(data, bytes);
    content_bytes += bytes;
}

void end_content(void) {
    pad(content_bytes);
}

void end_archive(void) {
    static const char zeros[2 * BLOCK];
    put_bytes(zeros, sizeof zeros);
    flush();
}
