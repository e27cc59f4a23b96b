/* A seccomp filter over tables of system calls, and the proof that it works. See guard.h. */
#define _GNU_SOURCE
#include "guard.h"

#include "call_list.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Numbers that the C library's headers may be too old for; the same on every machine type. */
enum { NR_QUOTACTL_FD = 443, NR_MOUNT_SETATTR = 442, NR_OPEN_TREE_ATTR = 467 };
enum { SOCKETCALL_SOCKET = 1, VSOCK = 40, IOPRIO_USER = 3, NO_I386 = -1, X32_BIT = 0x40000000, MAX_CODE = 2048 };
enum { PACKET = 17, NEW_TIME = 0x80, MAX_NUMBER = 512 };

/* When a call is refused: always; when an argument (its low word) equals `value`, or has one of its bits; when it sets
 * a limit of another process; when it asks to stop a process at its exit; when it is for another personality than Linux's
 * (as docker/seccomp.json allows them). AGENT as a value is the agent's pid. */
enum when { ALWAYS, EQUALS, HAS, SETS_OTHERS_LIMIT, HOLDS_AT_EXIT, ANOTHER_PERSONALITY };
#define AGENT UINT32_MAX

struct rule {
    const char *name;
    long number;
    int i386;
    int error; /* ENOSYS where programs know how to do without, else EPERM */
    enum when when;
    uint32_t argument, value;
};
#define REFUSE(name, i386, error) {#name, SYS_##name, i386, error, ALWAYS, 0, 0}

static const struct rule RULES[] = {
    /* What belongs to the machine and not to the slot: keys, programs in the kernel, handles of any file */
    REFUSE(add_key, 286, ENOSYS),
    REFUSE(request_key, 287, ENOSYS),
    REFUSE(keyctl, 288, ENOSYS),
    REFUSE(bpf, 357, EPERM),
    REFUSE(perf_event_open, 336, EPERM),
    REFUSE(syslog, 103, EPERM),
    REFUSE(open_by_handle_at, 342, EPERM),
    REFUSE(kexec_load, 283, EPERM),
    REFUSE(kexec_file_load, NO_I386, EPERM),
    REFUSE(quotactl, 131, EPERM),
    {"quotactl_fd", NR_QUOTACTL_FD, NR_QUOTACTL_FD, EPERM, ALWAYS, 0, 0},
    /* Counted for the whole machine (fs.aio-nr): one slot could leave none for the others */
    REFUSE(io_setup, 245, ENOSYS),
    {"socket", SYS_socket, 359, EAFNOSUPPORT, EQUALS, 0, VSOCK},
    /* What makes kernel bugs easy to exploit, and what no filter of system calls can look into */
    REFUSE(userfaultfd, 374, EPERM),
    REFUSE(io_uring_setup, 425, ENOSYS),
    REFUSE(io_uring_enter, 426, ENOSYS),
    REFUSE(io_uring_register, 427, ENOSYS),
    {"clone3", SYS_clone3, 435, ENOSYS, ALWAYS, 0, 0}, /* its flags lie in memory: callers fall back to clone */
    /* Mounts by descriptor: programs fall back to mount */
    REFUSE(open_tree, 428, ENOSYS),
    REFUSE(move_mount, 429, ENOSYS),
    REFUSE(fsopen, 430, ENOSYS),
    REFUSE(fsconfig, 431, ENOSYS),
    REFUSE(fsmount, 432, ENOSYS),
    REFUSE(fspick, 433, ENOSYS),
    {"mount_setattr", NR_MOUNT_SETATTR, NR_MOUNT_SETATTR, ENOSYS, ALWAYS, 0, 0},
    {"open_tree_attr", NR_OPEN_TREE_ATTR, NR_OPEN_TREE_ATTR, ENOSYS, ALWAYS, 0, 0},
    /* What the kernel would allow others to do to the agent, because it has the same uid as all of them */
    {"prlimit64", SYS_prlimit64, 340, EPERM, SETS_OTHERS_LIMIT, 0, 0},
    {"sched_setparam", SYS_sched_setparam, 154, EPERM, EQUALS, 0, AGENT},
    {"sched_setscheduler", SYS_sched_setscheduler, 156, EPERM, EQUALS, 0, AGENT},
    {"sched_setaffinity", SYS_sched_setaffinity, 241, EPERM, EQUALS, 0, AGENT},
    {"sched_setattr", SYS_sched_setattr, 351, EPERM, EQUALS, 0, AGENT},
    {"setpriority", SYS_setpriority, 97, EPERM, EQUALS, 1, AGENT},
    {"setpriority", SYS_setpriority, 97, EPERM, EQUALS, 0, PRIO_USER},
    {"ioprio_set", SYS_ioprio_set, 289, EPERM, EQUALS, 1, AGENT},
    {"ioprio_set", SYS_ioprio_set, 289, EPERM, EQUALS, 0, IOPRIO_USER},
    /* Two processes that stop each other at their exit could be killed by nobody: SIGKILL no longer ends that stop */
    {"ptrace", SYS_ptrace, 26, EPERM, HOLDS_AT_EXIT, 3, PTRACE_O_TRACEEXIT},
};

/* Namespaces and mounts: unless the slot may have nested ones. */
static const struct rule OWN_NAMESPACES[] = {
    REFUSE(setns, 346, EPERM),
    {"unshare", SYS_unshare, 310, EPERM, HAS, 0, CLONE_NEWUSER},
    {"clone", SYS_clone, 120, EPERM, HAS, 0, CLONE_NEWUSER},
    REFUSE(mount, 21, EPERM),
    REFUSE(umount2, 52, EPERM),
    REFUSE(pivot_root, 217, EPERM),
};

/* For a slot with root inside. Namespaces of any kind: the kernel refuses them too, as long as it has no flaw there. */
enum { NEW = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP };
static const struct rule OWN_ROOT[] = {
    {"unshare", SYS_unshare, NO_I386, EPERM, HAS, 0, (uint32_t)NEW | NEW_TIME},
    {"clone", SYS_clone, NO_I386, EPERM, HAS, 0, (uint32_t)NEW},
};
static const struct rule PERSONALITY = {"personality", SYS_personality, NO_I386, EPERM, ANOTHER_PERSONALITY, 0, 0};
static const struct rule PACKETS = {"socket", SYS_socket, NO_I386, EAFNOSUPPORT, EQUALS, 0, PACKET};
#define COUNT(table) (sizeof(table) / sizeof *(table))

/* ---- the filter ---- */

static struct sock_filter code[MAX_CODE];
static size_t code_size;

static void emit(unsigned operation, uint32_t value, unsigned yes, unsigned no) {
    code[code_size++] = (struct sock_filter){(uint16_t)operation, (uint8_t)yes, (uint8_t)no, value};
}

/* Each of these goes on to the next statement when the condition holds, and skips `skip` statements otherwise. */
static void if_equal(uint32_t value, unsigned skip) { emit(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skip); }
static void if_not_equal(uint32_t value, unsigned skip) { emit(BPF_JMP | BPF_JEQ | BPF_K, value, skip, 0); }
static void if_has(uint32_t bits, unsigned skip) { emit(BPF_JMP | BPF_JSET | BPF_K, bits, 0, skip); }

static void load(size_t offset) { emit(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0); }
static void load_number(void) { load(offsetof(struct seccomp_data, nr)); }
static void load_argument(uint32_t which) { load(offsetof(struct seccomp_data, args) + which * sizeof(uint64_t)); }
static void allow(void) { emit(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0); }
static void refuse(int error) { emit(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error, 0, 0); }

/* Before and after it, the call's number is loaded. Only calls with a rule ever load an argument, so the kernel can
 * tell that all others are allowed, and does not run the filter for them. */
static void emit_rule(const struct rule *rule, uint32_t number, pid_t agent) {
    uint32_t value = rule->value == AGENT ? (uint32_t)agent : rule->value;
    switch (rule->when) {
    case ALWAYS:
        if_equal(number, 1);
        refuse(rule->error);
        return;
    case EQUALS:
    case HAS:
        if_equal(number, 4);
        load_argument(rule->argument);
        rule->when == HAS ? if_has(value, 1) : if_equal(value, 1);
        refuse(rule->error);
        break;
    case SETS_OTHERS_LIMIT: /* the pid is not 0, and the new limit (a pointer: two words) is not NULL */
        if_equal(number, 8);
        load_argument(0);
        if_not_equal(0, 5);
        load_argument(2);
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 2);
        load(offsetof(struct seccomp_data, args) + 2 * sizeof(uint64_t) + sizeof(uint32_t));
        if_not_equal(0, 1);
        refuse(rule->error);
        break;
    case HOLDS_AT_EXIT:
        if_equal(number, 7);
        load_argument(rule->argument);
        if_has(value, 4);
        load_argument(0);
        emit(BPF_JMP | BPF_JEQ | BPF_K, PTRACE_SETOPTIONS, 1, 0);
        if_equal(PTRACE_SEIZE, 1);
        refuse(rule->error);
        break;
    case ANOTHER_PERSONALITY: /* PER_LINUX or PER_LINUX32, with UNAME26 (0x20000) or without; -1 only asks */
        if_equal(number, 5);
        load_argument(0);
        if_not_equal(UINT32_MAX, 3);
        emit(BPF_ALU | BPF_AND | BPF_K, ~(uint32_t)(0x20000 | 8), 0, 0);
        if_not_equal(0, 1);
        refuse(rule->error);
        break;
    }
    load_number();
}

static void emit_rules(const struct rule *rules, size_t count, pid_t agent) {
    for (size_t i = 0; i < count; i++)
        emit_rule(&rules[i], (uint32_t)rules[i].number, agent);
}

/* Allows what is listed, as ranges of numbers; programs know how to do without what is newer than the list (ENOSYS). */
static void emit_list(bool nested) {
    uint32_t newest = 0;
    for (uint32_t first = 0, end; first < MAX_NUMBER; first = end) {
        for (end = first; end < MAX_NUMBER && is_listed(end, nested); end++) {}
        if (end > first) {
            newest = end;
            emit(BPF_JMP | BPF_JGE | BPF_K, first, 0, 2);
            emit(BPF_JMP | BPF_JGE | BPF_K, end, 1, 0);
            allow();
        } else
            end++;
    }
    emit(BPF_JMP | BPF_JGE | BPF_K, newest, 0, 1);
    refuse(ENOSYS);
    refuse(EPERM);
}

/* Other ways to call the kernel have other numbers, which are not listed. */
static void emit_own_numbers_only(void) {
    load(offsetof(struct seccomp_data, arch));
#ifdef __x86_64__
    emit(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
#else
    emit(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_AARCH64, 1, 0);
#endif
    refuse(ENOSYS);
}

#ifdef __x86_64__
/* i386 programs have other numbers, and one call that makes sockets of any family. */
static void emit_i386(pid_t agent) {
    load(offsetof(struct seccomp_data, arch));
    if_not_equal(AUDIT_ARCH_I386, 1);
    size_t jump = code_size;
    emit(BPF_JMP | BPF_JA, 0, 0, 0); /* over all that follows; filled in below */
    load_number();
    for (size_t i = 0; i < COUNT(RULES); i++)
        if (RULES[i].i386 != NO_I386)
            emit_rule(&RULES[i], (uint32_t)RULES[i].i386, agent);
    for (size_t i = 0; i < COUNT(OWN_NAMESPACES); i++)
        emit_rule(&OWN_NAMESPACES[i], (uint32_t)OWN_NAMESPACES[i].i386, agent);
    emit_rule(&(struct rule){"socketcall", 0, 102, EAFNOSUPPORT, EQUALS, 0, SOCKETCALL_SOCKET}, 102, agent);
    emit_rule(&(struct rule){"umount", 0, 22, EPERM, ALWAYS, 0, 0}, 22, agent);
    allow();
    code[jump].k = (uint32_t)(code_size - jump - 1);
}

/* x32, the third way to call an x86-64 kernel, has yet other numbers, and hardly any program uses it. A tracer's -1 (no
 * call) is not one of them. */
static void emit_x32(void) {
    if_equal(UINT32_MAX, 1);
    allow();
    emit(BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1);
    refuse(ENOSYS);
}
#endif

bool guard_slot(pid_t agent, const struct guard *guard) {
    code_size = 0;
    if (guard->listed)
        emit_own_numbers_only();
#ifdef __x86_64__
    else
        emit_i386(agent);
#endif
    load_number();
#ifdef __x86_64__
    emit_x32();
#endif
    emit_rules(RULES, COUNT(RULES), agent);
    if (!guard->nested)
        emit_rules(OWN_NAMESPACES, COUNT(OWN_NAMESPACES), agent);
    if (guard->listed) {
        if (!guard->nested)
            emit_rules(OWN_ROOT, COUNT(OWN_ROOT), agent);
        if (!guard->packets)
            emit_rules(&PACKETS, 1, agent);
        emit_rules(&PERSONALITY, 1, agent);
        emit_list(guard->nested);
    } else
        allow();
    struct sock_fprog program = {(unsigned short)code_size, code};
    if (!guard->may_gain && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return false;
    return !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

/* ---- the proof ---- */

static void print(const char *first, const char *second) {
    char line[64];
    size_t bytes = 0;
    for (const char *at = first; *at; at++)
        line[bytes++] = *at;
    for (const char *at = second; *at; at++)
        line[bytes++] = *at;
    line[bytes++] = '\n';
    if (write(1, line, bytes) < 0)
        _exit(1);
}

/* Tries the call with arguments that do no harm where it is allowed. In a slot the agent is process 1. */
static bool is_refused(const struct rule *rule) {
    pid_t self = getpid();
    static const uint64_t no_limit[2] = {UINT64_MAX, UINT64_MAX};
    unsigned long arguments[4] = {0};
    uint32_t value = rule->value == AGENT ? 1 : rule->value;
    if (rule->when == ALWAYS)
        memset(arguments, 0xff, sizeof arguments);
    else if (rule->when == SETS_OTHERS_LIMIT) {
        arguments[0] = 1;
        arguments[1] = RLIMIT_CORE + 1000; /* there is none */
        arguments[2] = (unsigned long)(uintptr_t)no_limit;
    } else if (rule->when == HOLDS_AT_EXIT) {
        arguments[0] = PTRACE_SETOPTIONS;
        arguments[1] = INT32_MAX; /* no process */
        arguments[3] = value;
    } else
        arguments[rule->argument] = value;
    long result = syscall(rule->number, arguments[0], arguments[1], arguments[2], arguments[3]);
    if (!result && rule->number == SYS_clone && getpid() != self) /* it was allowed: this is the new process */
        _exit(0);
    return result == -1 && errno == rule->error;
}

static size_t prove(const struct rule *rules, size_t count) {
    size_t refused = 0;
    for (size_t i = 0; i < count; i++) {
        bool held = is_refused(&rules[i]);
        refused += held;
        if (!held)
            print("allowed ", rules[i].name);
    }
    return refused;
}

int prove_guard(void) {
    size_t refused = prove(RULES, COUNT(RULES)) + prove(OWN_NAMESPACES, COUNT(OWN_NAMESPACES));
    char digits[12] = {0}, *at = digits + 10;
    do
        *at-- = (char)('0' + refused % 10);
    while (refused /= 10);
    print("refused ", at + 1);
    return 0;
}
