/* A seccomp filter over tables of system calls, and the proof that it works. See guard.h. */
#define _GNU_SOURCE
#include "guard.h"

#include "call_list.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
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
enum { NR_MEMFD_SECRET = 447, NR_CACHESTAT = 451, NR_MAP_SHADOW_STACK = 453 };
enum { IOPRIO_USER = 3, X32_BIT = 0x40000000, MAX_CODE = 2048, NEW_TIME = 0x80, MAX_NUMBER = 512, SUCCESS = 0 };
enum { ATTACH_FILTER = 26, SNDBUF_FORCE = 32, RCVBUF_FORCE = 33, ATTACH_BPF = 50, REUSEPORT_CBPF = 51, REUSEPORT_EBPF = 52 };

/* When a call is refused: always; when an argument (its low word) equals `value`, or has one of its bits, or is another;
 * when it sets this option of a socket; when it sets a limit of another process; when it asks to stop a process at its
 * exit; when it is for another personality than Linux's, with random addresses or without. AGENT as a value is the agent's
 * pid. */
enum when { ALWAYS, EQUALS, DIFFERS, HAS, SETS_OPTION, SETS_OTHERS_LIMIT, HOLDS_AT_EXIT, ANOTHER_PERSONALITY };
#define AGENT UINT32_MAX

struct rule {
    const char *name;
    long number;
    int error; /* ENOSYS where programs know how to do without, SUCCESS where there is nothing to do, else EPERM */
    enum when when;
    uint32_t argument, value;
};
#define REFUSE(name, error) {#name, SYS_##name, error, ALWAYS, 0, 0}
#define NO_OPTION(option, error) {#option, SYS_setsockopt, error, SETS_OPTION, 2, option}

static const struct rule RULES[] = {
    /* What belongs to the machine and not to the slot: keys, programs in the kernel, handles of any file */
    REFUSE(add_key, ENOSYS),
    REFUSE(request_key, ENOSYS),
    REFUSE(keyctl, ENOSYS),
    REFUSE(bpf, EPERM),
    REFUSE(perf_event_open, EPERM),
    REFUSE(syslog, EPERM),
    REFUSE(open_by_handle_at, EPERM),
    REFUSE(kexec_load, EPERM),
    REFUSE(kexec_file_load, EPERM),
    REFUSE(quotactl, EPERM),
    {"quotactl_fd", NR_QUOTACTL_FD, EPERM, ALWAYS, 0, 0},
    /* Counted for the whole machine (fs.aio-nr): one slot could leave none for the others */
    REFUSE(io_setup, ENOSYS),
    /* What works only on what io_setup, fanotify_init and open_by_handle_at give */
    REFUSE(io_submit, ENOSYS),
    REFUSE(io_cancel, ENOSYS),
    REFUSE(io_destroy, ENOSYS),
    REFUSE(io_getevents, ENOSYS),
    REFUSE(io_pgetevents, ENOSYS),
    REFUSE(fanotify_mark, ENOSYS),
    REFUSE(name_to_handle_at, ENOSYS),
    /* Which pages of a shared file are in memory: what other slots of the same image read */
    REFUSE(mincore, ENOSYS),
    {"cachestat", NR_CACHESTAT, ENOSYS, ALWAYS, 0, 0},
    /* They write out the disks of the machine. What a slot writes need not outlive a failure of the machine. */
    REFUSE(sync, SUCCESS),
    REFUSE(syncfs, SUCCESS),
    /* Hardly used, and often flawed */
    {"memfd_secret", NR_MEMFD_SECRET, ENOSYS, ALWAYS, 0, 0},
    {"map_shadow_stack", NR_MAP_SHADOW_STACK, ENOSYS, ALWAYS, 0, 0},
#ifdef SYS_modify_ldt
    REFUSE(modify_ldt, ENOSYS),
#endif
    REFUSE(remap_file_pages, ENOSYS),
    REFUSE(vmsplice, ENOSYS),
    /* Buffers beyond net.core.rmem_max, which root of a network namespace may have: no cgroup counts them all */
    NO_OPTION(SNDBUF_FORCE, EPERM),
    NO_OPTION(RCVBUF_FORCE, EPERM),
    {"socketpair", SYS_socketpair, EOPNOTSUPP, DIFFERS, 0, AF_UNIX},
    /* Listed all the same: process_vm_readv and process_vm_writev (debuggers, MPI; the kernel asks for the right to trace),
     * adjtimex and clock_adjtime (they read the clock; to set it takes a capability that no slot has). */
    /* What makes kernel bugs easy to exploit, and what no filter of system calls can look into */
    REFUSE(userfaultfd, EPERM),
    REFUSE(io_uring_setup, ENOSYS),
    REFUSE(io_uring_enter, ENOSYS),
    REFUSE(io_uring_register, ENOSYS),
    {"clone3", SYS_clone3, ENOSYS, ALWAYS, 0, 0}, /* its flags lie in memory: callers fall back to clone */
    /* Mounts by descriptor: programs fall back to mount */
    REFUSE(open_tree, ENOSYS),
    REFUSE(move_mount, ENOSYS),
    REFUSE(fsopen, ENOSYS),
    REFUSE(fsconfig, ENOSYS),
    REFUSE(fsmount, ENOSYS),
    REFUSE(fspick, ENOSYS),
    {"mount_setattr", NR_MOUNT_SETATTR, ENOSYS, ALWAYS, 0, 0},
    {"open_tree_attr", NR_OPEN_TREE_ATTR, ENOSYS, ALWAYS, 0, 0},
    /* What the kernel would allow others to do to the agent, because it has the same uid as all of them */
    {"prlimit64", SYS_prlimit64, EPERM, SETS_OTHERS_LIMIT, 0, 0},
    {"sched_setparam", SYS_sched_setparam, EPERM, EQUALS, 0, AGENT},
    {"sched_setscheduler", SYS_sched_setscheduler, EPERM, EQUALS, 0, AGENT},
    {"sched_setaffinity", SYS_sched_setaffinity, EPERM, EQUALS, 0, AGENT},
    {"sched_setattr", SYS_sched_setattr, EPERM, EQUALS, 0, AGENT},
    {"setpriority", SYS_setpriority, EPERM, EQUALS, 1, AGENT},
    {"setpriority", SYS_setpriority, EPERM, EQUALS, 0, PRIO_USER},
    {"ioprio_set", SYS_ioprio_set, EPERM, EQUALS, 1, AGENT},
    {"ioprio_set", SYS_ioprio_set, EPERM, EQUALS, 0, IOPRIO_USER},
    /* Two processes that stop each other at their exit could not be killed: SIGKILL no longer ends that stop */
    {"ptrace", SYS_ptrace, EPERM, HOLDS_AT_EXIT, 3, PTRACE_O_TRACEEXIT},
};

/* Namespaces and mounts: unless the slot may have nested ones. And filters of system calls, which browsers put on where
 * they have nested namespaces: their machine code counts in net.core.bpf_jit_limit, the machine's, without which no
 * further slot could have its own filter. EINVAL is the answer of a kernel without filters. */
static const struct rule OWN_NAMESPACES[] = {
    REFUSE(setns, EPERM),
    {"unshare", SYS_unshare, EPERM, HAS, 0, CLONE_NEWUSER},
    {"clone", SYS_clone, EPERM, HAS, 0, CLONE_NEWUSER},
    REFUSE(mount, EPERM),
    REFUSE(umount2, EPERM),
    REFUSE(pivot_root, EPERM),
    {"seccomp", SYS_seccomp, EINVAL, EQUALS, 0, SECCOMP_SET_MODE_FILTER},
    {"prctl", SYS_prctl, EINVAL, EQUALS, 0, PR_SET_SECCOMP},
};

/* Namespaces of any kind: the kernel refuses them too, as long as it has no flaw there. */
enum { NEW = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP };
static const struct rule ANY_NAMESPACE[] = {
    {"unshare", SYS_unshare, EPERM, HAS, 0, (uint32_t)NEW | NEW_TIME},
    {"clone", SYS_clone, EPERM, HAS, 0, (uint32_t)NEW},
};
static const struct rule PERSONALITY = {"personality", SYS_personality, EPERM, ANOTHER_PERSONALITY, 0, 0};

/* Programs of sockets: for who captures packets. Their machine code counts in net.core.bpf_jit_limit, too. */
static const struct rule SOCKET_PROGRAMS[] = {
    NO_OPTION(ATTACH_FILTER, EPERM),
    NO_OPTION(ATTACH_BPF, EPERM),
    NO_OPTION(REUSEPORT_CBPF, EPERM),
    NO_OPTION(REUSEPORT_EBPF, EPERM),
};
#define COUNT(table) (sizeof(table) / sizeof *(table))

/* The sockets that a slot may make: what programs need. The memory of most others is counted by no cgroup, and many are
 * modules that the machine would load for the slot. The kernel still asks for CAP_NET_RAW where the type is SOCK_RAW. */
enum needs { NOTHING, PACKETS, NET_ADMIN };
enum { ANY = -1, TYPE_BITS = 0xf };
struct socket_rule {
    int family, type, protocol;
    enum needs needs;
};
static const struct socket_rule SOCKETS[] = {
    {AF_UNIX, ANY, ANY, NOTHING},
    {AF_INET, SOCK_STREAM, 0, NOTHING},
    {AF_INET, SOCK_STREAM, IPPROTO_TCP, NOTHING},
    {AF_INET, SOCK_DGRAM, 0, NOTHING},
    {AF_INET, SOCK_DGRAM, IPPROTO_UDP, NOTHING},
    {AF_INET, SOCK_DGRAM, IPPROTO_ICMP, NOTHING}, /* ping asks for it first; the kernel answers EACCES */
    {AF_INET, SOCK_RAW, IPPROTO_ICMP, NOTHING},
    {AF_INET6, SOCK_STREAM, 0, NOTHING},
    {AF_INET6, SOCK_STREAM, IPPROTO_TCP, NOTHING},
    {AF_INET6, SOCK_DGRAM, 0, NOTHING},
    {AF_INET6, SOCK_DGRAM, IPPROTO_UDP, NOTHING},
    {AF_INET6, SOCK_DGRAM, IPPROTO_ICMPV6, NOTHING},
    {AF_INET6, SOCK_RAW, IPPROTO_ICMPV6, NOTHING},
    {AF_NETLINK, ANY, NETLINK_ROUTE, NOTHING},
    {AF_INET, SOCK_RAW, ANY, PACKETS},
    {AF_INET6, SOCK_RAW, ANY, PACKETS},
    {AF_PACKET, ANY, ANY, PACKETS},
    {AF_INET, SOCK_RAW, IPPROTO_RAW, NET_ADMIN}, /* iptables, the older */
    {AF_INET6, SOCK_RAW, IPPROTO_RAW, NET_ADMIN},
    {AF_NETLINK, ANY, NETLINK_NETFILTER, NET_ADMIN}, /* and the newer */
};

/* ---- the filter ---- */

static struct sock_filter code[MAX_CODE];
static size_t code_size;

static void emit(unsigned operation, uint32_t value, unsigned yes, unsigned no) {
    code[code_size++] = (struct sock_filter){(uint16_t)operation, (uint8_t)yes, (uint8_t)no, value};
}

/* Each of these continues with the next statement when the condition holds, and skips `skip` statements otherwise. */
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
    case DIFFERS:
    case HAS:
        if_equal(number, 4);
        load_argument(rule->argument);
        rule->when == HAS ? if_has(value, 1) : rule->when == EQUALS ? if_equal(value, 1) : if_not_equal(value, 1);
        refuse(rule->error);
        break;
    case SETS_OPTION:
        if_equal(number, 6);
        load_argument(1);
        if_equal(SOL_SOCKET, 3);
        load_argument(rule->argument);
        if_equal(value, 1);
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
    case ANOTHER_PERSONALITY: /* PER_LINUX or PER_LINUX32, with UNAME26, ADDR_NO_RANDOMIZE or without; -1 only queries */
        if_equal(number, 5);
        load_argument(0);
        if_not_equal(UINT32_MAX, 3);
        emit(BPF_ALU | BPF_AND | BPF_K, ~(uint32_t)(0x20000 | 0x40000 | 8), 0, 0);
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

static bool is_open_to(const struct socket_rule *rule, const struct guard *guard) {
    return rule->needs == NOTHING || (rule->needs == PACKETS ? guard->packets : guard->net_admin);
}

static void emit_socket(const struct socket_rule *rule) {
    unsigned left = 3U + 3U * (rule->type != ANY) + 2U * (rule->protocol != ANY);
    load_argument(0);
    if_equal((uint32_t)rule->family, left -= 2);
    if (rule->type != ANY) {
        load_argument(1);
        emit(BPF_ALU | BPF_AND | BPF_K, TYPE_BITS, 0, 0);
        if_equal((uint32_t)rule->type, left -= 3);
    }
    if (rule->protocol != ANY) {
        load_argument(2);
        if_equal((uint32_t)rule->protocol, left - 2);
    }
    allow();
}

/* A protocol that is not there makes programs fall back (Go: from MPTCP to TCP), and so does a family. */
static void emit_sockets(const struct guard *guard) {
    size_t start = code_size;
    if_equal(SYS_socket, 0); /* over all that follows; filled in below */
    for (size_t i = 0; i < COUNT(SOCKETS); i++)
        if (is_open_to(&SOCKETS[i], guard))
            emit_socket(&SOCKETS[i]);
    load_argument(0);
    emit(BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 3, 0);
    emit(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 2, 0);
    emit(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 1, 0);
    refuse(EAFNOSUPPORT);
    refuse(EPROTONOSUPPORT);
    _Static_assert(COUNT(SOCKETS) * 8 + 6 <= UINT8_MAX, "a conditional jump reaches as far");
    code[start].jf = (uint8_t)(code_size - start - 1);
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
/* x32, another way to call an x86-64 kernel, has yet other numbers, and hardly any program uses it. A tracer's -1 (no
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
    emit_own_numbers_only();
    load_number();
#ifdef __x86_64__
    emit_x32();
#endif
    emit_rules(RULES, COUNT(RULES), agent);
    if (!guard->nested) {
        emit_rules(OWN_NAMESPACES, COUNT(OWN_NAMESPACES), agent);
        emit_rules(ANY_NAMESPACE, COUNT(ANY_NAMESPACE), agent);
    }
    if (!guard->packets)
        emit_rules(SOCKET_PROGRAMS, COUNT(SOCKET_PROGRAMS), agent);
    emit_rules(&PERSONALITY, 1, agent);
    emit_sockets(guard);
    emit_list(guard->nested);
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
    } else if (rule->when == SETS_OPTION) {
        arguments[0] = (unsigned long)-1; /* no socket */
        arguments[1] = SOL_SOCKET;
        arguments[2] = value;
    } else
        arguments[rule->argument] = rule->when == DIFFERS ? value + 1 : value;
    long result = syscall(rule->number, arguments[0], arguments[1], arguments[2], arguments[3]);
    if (!result && rule->number == SYS_clone && getpid() != self) /* it was allowed: this is the new process */
        _exit(0);
    return rule->error == SUCCESS ? !result : result == -1 && errno == rule->error;
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

/* One of each kind that no slot has; and a call that is in no table. */
static size_t prove_lists(void) {
    static const struct { const char *name; int family, type, protocol, error; } sockets[] = {
        {"socket of AF_XDP", AF_XDP, SOCK_RAW, 0, EAFNOSUPPORT},
        {"socket of AF_VSOCK", AF_VSOCK, SOCK_STREAM, 0, EAFNOSUPPORT},
        {"socket of AF_ALG", AF_ALG, SOCK_SEQPACKET, 0, EAFNOSUPPORT},
        {"socket of NETLINK_USERSOCK", AF_NETLINK, SOCK_RAW, NETLINK_USERSOCK, EPROTONOSUPPORT},
        {"socket of UDPLITE", AF_INET, SOCK_DGRAM, IPPROTO_UDPLITE, EPROTONOSUPPORT},
    };
    size_t refused = 0;
    for (size_t i = 0; i < COUNT(sockets); i++) {
        bool held = socket(sockets[i].family, sockets[i].type, sockets[i].protocol) < 0 && errno == sockets[i].error;
        refused += held;
        if (!held)
            print("allowed ", sockets[i].name);
    }
    return refused + prove(&(struct rule){"kcmp", SYS_kcmp, EPERM, ALWAYS, 0, 0}, 1);
}

int prove_guard(void) {
    size_t refused = prove(RULES, COUNT(RULES)) + prove(OWN_NAMESPACES, COUNT(OWN_NAMESPACES));
    refused += prove(SOCKET_PROGRAMS, COUNT(SOCKET_PROGRAMS)) + prove_lists();
    char digits[12] = {0}, *at = digits + 10;
    do
        *at-- = (char)('0' + refused % 10);
    while (refused /= 10);
    print("refused ", at + 1);
    return 0;
}
