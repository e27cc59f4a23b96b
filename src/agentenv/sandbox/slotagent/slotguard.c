/* What no process of a slot may do to another: change its rlimits. See slotagent.h. */
#define _GNU_SOURCE
#include "slotagent.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define FIELD(name) (uint32_t)offsetof(struct seccomp_data, name)
#define LOAD(offset) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(offset))
#define IF_EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), yes, no)
#define ANSWER(verdict) BPF_STMT(BPF_RET | BPF_K, (uint32_t)(verdict))
#define X32_BIT 0x40000000u
#define I386_PRLIMIT64 340

/* The kernel lets any process of the same uid lower another's limits, non-dumpable or not. With a CPU
 * limit on the agent a policy could have its slot killed and its rollout taken for our failure, so
 * prlimit64 with a new limit for another process is EPERM for the whole slot. Inherited by all children;
 * prlimit64 is asked for by few programs, and by those for themselves (pid 0) or to look (no new limit). */
bool guard_limits(void) {
    struct sock_filter code[] = {
#ifdef __x86_64__
        LOAD(FIELD(arch)),
        IF_EQUAL(AUDIT_ARCH_X86_64, 2, 0),
        LOAD(FIELD(nr)), /* whatever is not x86-64 here is i386 */
        IF_EQUAL(I386_PRLIMIT64, 3, 10),
        LOAD(FIELD(nr)),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~X32_BIT),
#else
        LOAD(FIELD(nr)),
#endif
        IF_EQUAL(SYS_prlimit64, 0, 7),
        LOAD(FIELD(args[0])), /* the pid: an int, so the low word is all of it */
        IF_EQUAL(0, 5, 0),
        LOAD(FIELD(args[2])), /* the new limit: a pointer, both words of it */
        IF_EQUAL(0, 0, 2),
        LOAD(FIELD(args[2]) + sizeof(uint32_t)),
        IF_EQUAL(0, 1, 0),
        ANSWER(SECCOMP_RET_ERRNO | EPERM),
        ANSWER(SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
