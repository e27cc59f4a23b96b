/* Written by agentenv.sandbox.slotagent.call_list from docker/seccomp.json: change that. */
#include "call_list.h"

#include <sys/syscall.h>

bool is_listed(long number, bool nested) {
    switch (number) {
#ifdef SYS_accept
    case SYS_accept:
#endif
#ifdef SYS_accept4
    case SYS_accept4:
#endif
#ifdef SYS_access
    case SYS_access:
#endif
#ifdef SYS_adjtimex
    case SYS_adjtimex:
#endif
#ifdef SYS_alarm
    case SYS_alarm:
#endif
#ifdef SYS_arch_prctl
    case SYS_arch_prctl:
#endif
#ifdef SYS_bind
    case SYS_bind:
#endif
#ifdef SYS_brk
    case SYS_brk:
#endif
#ifdef SYS_cachestat
    case SYS_cachestat:
#endif
#ifdef SYS_capget
    case SYS_capget:
#endif
#ifdef SYS_capset
    case SYS_capset:
#endif
#ifdef SYS_chdir
    case SYS_chdir:
#endif
#ifdef SYS_chmod
    case SYS_chmod:
#endif
#ifdef SYS_chown
    case SYS_chown:
#endif
#ifdef SYS_chroot
    case SYS_chroot:
#endif
#ifdef SYS_clock_adjtime
    case SYS_clock_adjtime:
#endif
#ifdef SYS_clock_getres
    case SYS_clock_getres:
#endif
#ifdef SYS_clock_gettime
    case SYS_clock_gettime:
#endif
#ifdef SYS_clock_nanosleep
    case SYS_clock_nanosleep:
#endif
#ifdef SYS_clone
    case SYS_clone:
#endif
#ifdef SYS_close
    case SYS_close:
#endif
#ifdef SYS_close_range
    case SYS_close_range:
#endif
#ifdef SYS_connect
    case SYS_connect:
#endif
#ifdef SYS_copy_file_range
    case SYS_copy_file_range:
#endif
#ifdef SYS_creat
    case SYS_creat:
#endif
#ifdef SYS_dup
    case SYS_dup:
#endif
#ifdef SYS_dup2
    case SYS_dup2:
#endif
#ifdef SYS_dup3
    case SYS_dup3:
#endif
#ifdef SYS_epoll_create
    case SYS_epoll_create:
#endif
#ifdef SYS_epoll_create1
    case SYS_epoll_create1:
#endif
#ifdef SYS_epoll_ctl
    case SYS_epoll_ctl:
#endif
#ifdef SYS_epoll_pwait
    case SYS_epoll_pwait:
#endif
#ifdef SYS_epoll_pwait2
    case SYS_epoll_pwait2:
#endif
#ifdef SYS_epoll_wait
    case SYS_epoll_wait:
#endif
#ifdef SYS_eventfd
    case SYS_eventfd:
#endif
#ifdef SYS_eventfd2
    case SYS_eventfd2:
#endif
#ifdef SYS_execve
    case SYS_execve:
#endif
#ifdef SYS_execveat
    case SYS_execveat:
#endif
#ifdef SYS_exit
    case SYS_exit:
#endif
#ifdef SYS_exit_group
    case SYS_exit_group:
#endif
#ifdef SYS_faccessat
    case SYS_faccessat:
#endif
#ifdef SYS_faccessat2
    case SYS_faccessat2:
#endif
#ifdef SYS_fadvise64
    case SYS_fadvise64:
#endif
#ifdef SYS_fallocate
    case SYS_fallocate:
#endif
#ifdef SYS_fanotify_mark
    case SYS_fanotify_mark:
#endif
#ifdef SYS_fchdir
    case SYS_fchdir:
#endif
#ifdef SYS_fchmod
    case SYS_fchmod:
#endif
#ifdef SYS_fchmodat
    case SYS_fchmodat:
#endif
#ifdef SYS_fchmodat2
    case SYS_fchmodat2:
#endif
#ifdef SYS_fchown
    case SYS_fchown:
#endif
#ifdef SYS_fchownat
    case SYS_fchownat:
#endif
#ifdef SYS_fcntl
    case SYS_fcntl:
#endif
#ifdef SYS_fdatasync
    case SYS_fdatasync:
#endif
#ifdef SYS_fgetxattr
    case SYS_fgetxattr:
#endif
#ifdef SYS_flistxattr
    case SYS_flistxattr:
#endif
#ifdef SYS_flock
    case SYS_flock:
#endif
#ifdef SYS_fork
    case SYS_fork:
#endif
#ifdef SYS_fremovexattr
    case SYS_fremovexattr:
#endif
#ifdef SYS_fsetxattr
    case SYS_fsetxattr:
#endif
#ifdef SYS_fstat
    case SYS_fstat:
#endif
#ifdef SYS_fstatfs
    case SYS_fstatfs:
#endif
#ifdef SYS_fsync
    case SYS_fsync:
#endif
#ifdef SYS_ftruncate
    case SYS_ftruncate:
#endif
#ifdef SYS_futex
    case SYS_futex:
#endif
#ifdef SYS_futex_requeue
    case SYS_futex_requeue:
#endif
#ifdef SYS_futex_wait
    case SYS_futex_wait:
#endif
#ifdef SYS_futex_waitv
    case SYS_futex_waitv:
#endif
#ifdef SYS_futex_wake
    case SYS_futex_wake:
#endif
#ifdef SYS_futimesat
    case SYS_futimesat:
#endif
#ifdef SYS_get_robust_list
    case SYS_get_robust_list:
#endif
#ifdef SYS_getcpu
    case SYS_getcpu:
#endif
#ifdef SYS_getcwd
    case SYS_getcwd:
#endif
#ifdef SYS_getdents
    case SYS_getdents:
#endif
#ifdef SYS_getdents64
    case SYS_getdents64:
#endif
#ifdef SYS_getegid
    case SYS_getegid:
#endif
#ifdef SYS_geteuid
    case SYS_geteuid:
#endif
#ifdef SYS_getgid
    case SYS_getgid:
#endif
#ifdef SYS_getgroups
    case SYS_getgroups:
#endif
#ifdef SYS_getitimer
    case SYS_getitimer:
#endif
#ifdef SYS_getpeername
    case SYS_getpeername:
#endif
#ifdef SYS_getpgid
    case SYS_getpgid:
#endif
#ifdef SYS_getpgrp
    case SYS_getpgrp:
#endif
#ifdef SYS_getpid
    case SYS_getpid:
#endif
#ifdef SYS_getppid
    case SYS_getppid:
#endif
#ifdef SYS_getpriority
    case SYS_getpriority:
#endif
#ifdef SYS_getrandom
    case SYS_getrandom:
#endif
#ifdef SYS_getresgid
    case SYS_getresgid:
#endif
#ifdef SYS_getresuid
    case SYS_getresuid:
#endif
#ifdef SYS_getrlimit
    case SYS_getrlimit:
#endif
#ifdef SYS_getrusage
    case SYS_getrusage:
#endif
#ifdef SYS_getsid
    case SYS_getsid:
#endif
#ifdef SYS_getsockname
    case SYS_getsockname:
#endif
#ifdef SYS_getsockopt
    case SYS_getsockopt:
#endif
#ifdef SYS_gettid
    case SYS_gettid:
#endif
#ifdef SYS_gettimeofday
    case SYS_gettimeofday:
#endif
#ifdef SYS_getuid
    case SYS_getuid:
#endif
#ifdef SYS_getxattr
    case SYS_getxattr:
#endif
#ifdef SYS_inotify_add_watch
    case SYS_inotify_add_watch:
#endif
#ifdef SYS_inotify_init
    case SYS_inotify_init:
#endif
#ifdef SYS_inotify_init1
    case SYS_inotify_init1:
#endif
#ifdef SYS_inotify_rm_watch
    case SYS_inotify_rm_watch:
#endif
#ifdef SYS_io_cancel
    case SYS_io_cancel:
#endif
#ifdef SYS_io_destroy
    case SYS_io_destroy:
#endif
#ifdef SYS_io_getevents
    case SYS_io_getevents:
#endif
#ifdef SYS_io_pgetevents
    case SYS_io_pgetevents:
#endif
#ifdef SYS_io_setup
    case SYS_io_setup:
#endif
#ifdef SYS_io_submit
    case SYS_io_submit:
#endif
#ifdef SYS_ioctl
    case SYS_ioctl:
#endif
#ifdef SYS_ioprio_get
    case SYS_ioprio_get:
#endif
#ifdef SYS_ioprio_set
    case SYS_ioprio_set:
#endif
#ifdef SYS_kill
    case SYS_kill:
#endif
#ifdef SYS_landlock_add_rule
    case SYS_landlock_add_rule:
#endif
#ifdef SYS_landlock_create_ruleset
    case SYS_landlock_create_ruleset:
#endif
#ifdef SYS_landlock_restrict_self
    case SYS_landlock_restrict_self:
#endif
#ifdef SYS_lchown
    case SYS_lchown:
#endif
#ifdef SYS_lgetxattr
    case SYS_lgetxattr:
#endif
#ifdef SYS_link
    case SYS_link:
#endif
#ifdef SYS_linkat
    case SYS_linkat:
#endif
#ifdef SYS_listen
    case SYS_listen:
#endif
#ifdef SYS_listxattr
    case SYS_listxattr:
#endif
#ifdef SYS_llistxattr
    case SYS_llistxattr:
#endif
#ifdef SYS_lremovexattr
    case SYS_lremovexattr:
#endif
#ifdef SYS_lseek
    case SYS_lseek:
#endif
#ifdef SYS_lsetxattr
    case SYS_lsetxattr:
#endif
#ifdef SYS_lstat
    case SYS_lstat:
#endif
#ifdef SYS_madvise
    case SYS_madvise:
#endif
#ifdef SYS_map_shadow_stack
    case SYS_map_shadow_stack:
#endif
#ifdef SYS_membarrier
    case SYS_membarrier:
#endif
#ifdef SYS_memfd_create
    case SYS_memfd_create:
#endif
#ifdef SYS_memfd_secret
    case SYS_memfd_secret:
#endif
#ifdef SYS_mincore
    case SYS_mincore:
#endif
#ifdef SYS_mkdir
    case SYS_mkdir:
#endif
#ifdef SYS_mkdirat
    case SYS_mkdirat:
#endif
#ifdef SYS_mknod
    case SYS_mknod:
#endif
#ifdef SYS_mknodat
    case SYS_mknodat:
#endif
#ifdef SYS_mlock
    case SYS_mlock:
#endif
#ifdef SYS_mlock2
    case SYS_mlock2:
#endif
#ifdef SYS_mlockall
    case SYS_mlockall:
#endif
#ifdef SYS_mmap
    case SYS_mmap:
#endif
#ifdef SYS_modify_ldt
    case SYS_modify_ldt:
#endif
#ifdef SYS_mprotect
    case SYS_mprotect:
#endif
#ifdef SYS_mq_getsetattr
    case SYS_mq_getsetattr:
#endif
#ifdef SYS_mq_notify
    case SYS_mq_notify:
#endif
#ifdef SYS_mq_open
    case SYS_mq_open:
#endif
#ifdef SYS_mq_timedreceive
    case SYS_mq_timedreceive:
#endif
#ifdef SYS_mq_timedsend
    case SYS_mq_timedsend:
#endif
#ifdef SYS_mq_unlink
    case SYS_mq_unlink:
#endif
#ifdef SYS_mremap
    case SYS_mremap:
#endif
#ifdef SYS_mseal
    case SYS_mseal:
#endif
#ifdef SYS_msgctl
    case SYS_msgctl:
#endif
#ifdef SYS_msgget
    case SYS_msgget:
#endif
#ifdef SYS_msgrcv
    case SYS_msgrcv:
#endif
#ifdef SYS_msgsnd
    case SYS_msgsnd:
#endif
#ifdef SYS_msync
    case SYS_msync:
#endif
#ifdef SYS_munlock
    case SYS_munlock:
#endif
#ifdef SYS_munlockall
    case SYS_munlockall:
#endif
#ifdef SYS_munmap
    case SYS_munmap:
#endif
#ifdef SYS_name_to_handle_at
    case SYS_name_to_handle_at:
#endif
#ifdef SYS_nanosleep
    case SYS_nanosleep:
#endif
#ifdef SYS_newfstatat
    case SYS_newfstatat:
#endif
#ifdef SYS_open
    case SYS_open:
#endif
#ifdef SYS_openat
    case SYS_openat:
#endif
#ifdef SYS_openat2
    case SYS_openat2:
#endif
#ifdef SYS_pause
    case SYS_pause:
#endif
#ifdef SYS_personality
    case SYS_personality:
#endif
#ifdef SYS_pidfd_open
    case SYS_pidfd_open:
#endif
#ifdef SYS_pidfd_send_signal
    case SYS_pidfd_send_signal:
#endif
#ifdef SYS_pipe
    case SYS_pipe:
#endif
#ifdef SYS_pipe2
    case SYS_pipe2:
#endif
#ifdef SYS_pkey_alloc
    case SYS_pkey_alloc:
#endif
#ifdef SYS_pkey_free
    case SYS_pkey_free:
#endif
#ifdef SYS_pkey_mprotect
    case SYS_pkey_mprotect:
#endif
#ifdef SYS_poll
    case SYS_poll:
#endif
#ifdef SYS_ppoll
    case SYS_ppoll:
#endif
#ifdef SYS_prctl
    case SYS_prctl:
#endif
#ifdef SYS_pread64
    case SYS_pread64:
#endif
#ifdef SYS_preadv
    case SYS_preadv:
#endif
#ifdef SYS_preadv2
    case SYS_preadv2:
#endif
#ifdef SYS_prlimit64
    case SYS_prlimit64:
#endif
#ifdef SYS_process_mrelease
    case SYS_process_mrelease:
#endif
#ifdef SYS_process_vm_readv
    case SYS_process_vm_readv:
#endif
#ifdef SYS_process_vm_writev
    case SYS_process_vm_writev:
#endif
#ifdef SYS_pselect6
    case SYS_pselect6:
#endif
#ifdef SYS_ptrace
    case SYS_ptrace:
#endif
#ifdef SYS_pwrite64
    case SYS_pwrite64:
#endif
#ifdef SYS_pwritev
    case SYS_pwritev:
#endif
#ifdef SYS_pwritev2
    case SYS_pwritev2:
#endif
#ifdef SYS_read
    case SYS_read:
#endif
#ifdef SYS_readahead
    case SYS_readahead:
#endif
#ifdef SYS_readlink
    case SYS_readlink:
#endif
#ifdef SYS_readlinkat
    case SYS_readlinkat:
#endif
#ifdef SYS_readv
    case SYS_readv:
#endif
#ifdef SYS_recvfrom
    case SYS_recvfrom:
#endif
#ifdef SYS_recvmmsg
    case SYS_recvmmsg:
#endif
#ifdef SYS_recvmsg
    case SYS_recvmsg:
#endif
#ifdef SYS_remap_file_pages
    case SYS_remap_file_pages:
#endif
#ifdef SYS_removexattr
    case SYS_removexattr:
#endif
#ifdef SYS_rename
    case SYS_rename:
#endif
#ifdef SYS_renameat
    case SYS_renameat:
#endif
#ifdef SYS_renameat2
    case SYS_renameat2:
#endif
#ifdef SYS_restart_syscall
    case SYS_restart_syscall:
#endif
#ifdef SYS_rmdir
    case SYS_rmdir:
#endif
#ifdef SYS_rseq
    case SYS_rseq:
#endif
#ifdef SYS_rt_sigaction
    case SYS_rt_sigaction:
#endif
#ifdef SYS_rt_sigpending
    case SYS_rt_sigpending:
#endif
#ifdef SYS_rt_sigprocmask
    case SYS_rt_sigprocmask:
#endif
#ifdef SYS_rt_sigqueueinfo
    case SYS_rt_sigqueueinfo:
#endif
#ifdef SYS_rt_sigreturn
    case SYS_rt_sigreturn:
#endif
#ifdef SYS_rt_sigsuspend
    case SYS_rt_sigsuspend:
#endif
#ifdef SYS_rt_sigtimedwait
    case SYS_rt_sigtimedwait:
#endif
#ifdef SYS_rt_tgsigqueueinfo
    case SYS_rt_tgsigqueueinfo:
#endif
#ifdef SYS_sched_get_priority_max
    case SYS_sched_get_priority_max:
#endif
#ifdef SYS_sched_get_priority_min
    case SYS_sched_get_priority_min:
#endif
#ifdef SYS_sched_getaffinity
    case SYS_sched_getaffinity:
#endif
#ifdef SYS_sched_getattr
    case SYS_sched_getattr:
#endif
#ifdef SYS_sched_getparam
    case SYS_sched_getparam:
#endif
#ifdef SYS_sched_getscheduler
    case SYS_sched_getscheduler:
#endif
#ifdef SYS_sched_rr_get_interval
    case SYS_sched_rr_get_interval:
#endif
#ifdef SYS_sched_setaffinity
    case SYS_sched_setaffinity:
#endif
#ifdef SYS_sched_setattr
    case SYS_sched_setattr:
#endif
#ifdef SYS_sched_setparam
    case SYS_sched_setparam:
#endif
#ifdef SYS_sched_setscheduler
    case SYS_sched_setscheduler:
#endif
#ifdef SYS_sched_yield
    case SYS_sched_yield:
#endif
#ifdef SYS_seccomp
    case SYS_seccomp:
#endif
#ifdef SYS_select
    case SYS_select:
#endif
#ifdef SYS_semctl
    case SYS_semctl:
#endif
#ifdef SYS_semget
    case SYS_semget:
#endif
#ifdef SYS_semop
    case SYS_semop:
#endif
#ifdef SYS_semtimedop
    case SYS_semtimedop:
#endif
#ifdef SYS_sendfile
    case SYS_sendfile:
#endif
#ifdef SYS_sendmmsg
    case SYS_sendmmsg:
#endif
#ifdef SYS_sendmsg
    case SYS_sendmsg:
#endif
#ifdef SYS_sendto
    case SYS_sendto:
#endif
#ifdef SYS_set_robust_list
    case SYS_set_robust_list:
#endif
#ifdef SYS_set_tid_address
    case SYS_set_tid_address:
#endif
#ifdef SYS_setfsgid
    case SYS_setfsgid:
#endif
#ifdef SYS_setfsuid
    case SYS_setfsuid:
#endif
#ifdef SYS_setgid
    case SYS_setgid:
#endif
#ifdef SYS_setgroups
    case SYS_setgroups:
#endif
#ifdef SYS_setitimer
    case SYS_setitimer:
#endif
#ifdef SYS_setpgid
    case SYS_setpgid:
#endif
#ifdef SYS_setpriority
    case SYS_setpriority:
#endif
#ifdef SYS_setregid
    case SYS_setregid:
#endif
#ifdef SYS_setresgid
    case SYS_setresgid:
#endif
#ifdef SYS_setresuid
    case SYS_setresuid:
#endif
#ifdef SYS_setreuid
    case SYS_setreuid:
#endif
#ifdef SYS_setrlimit
    case SYS_setrlimit:
#endif
#ifdef SYS_setsid
    case SYS_setsid:
#endif
#ifdef SYS_setsockopt
    case SYS_setsockopt:
#endif
#ifdef SYS_setuid
    case SYS_setuid:
#endif
#ifdef SYS_setxattr
    case SYS_setxattr:
#endif
#ifdef SYS_shmat
    case SYS_shmat:
#endif
#ifdef SYS_shmctl
    case SYS_shmctl:
#endif
#ifdef SYS_shmdt
    case SYS_shmdt:
#endif
#ifdef SYS_shmget
    case SYS_shmget:
#endif
#ifdef SYS_shutdown
    case SYS_shutdown:
#endif
#ifdef SYS_sigaltstack
    case SYS_sigaltstack:
#endif
#ifdef SYS_signalfd
    case SYS_signalfd:
#endif
#ifdef SYS_signalfd4
    case SYS_signalfd4:
#endif
#ifdef SYS_socket
    case SYS_socket:
#endif
#ifdef SYS_socketpair
    case SYS_socketpair:
#endif
#ifdef SYS_splice
    case SYS_splice:
#endif
#ifdef SYS_stat
    case SYS_stat:
#endif
#ifdef SYS_statfs
    case SYS_statfs:
#endif
#ifdef SYS_statx
    case SYS_statx:
#endif
#ifdef SYS_symlink
    case SYS_symlink:
#endif
#ifdef SYS_symlinkat
    case SYS_symlinkat:
#endif
#ifdef SYS_sync
    case SYS_sync:
#endif
#ifdef SYS_sync_file_range
    case SYS_sync_file_range:
#endif
#ifdef SYS_syncfs
    case SYS_syncfs:
#endif
#ifdef SYS_sysinfo
    case SYS_sysinfo:
#endif
#ifdef SYS_tee
    case SYS_tee:
#endif
#ifdef SYS_tgkill
    case SYS_tgkill:
#endif
#ifdef SYS_time
    case SYS_time:
#endif
#ifdef SYS_timer_create
    case SYS_timer_create:
#endif
#ifdef SYS_timer_delete
    case SYS_timer_delete:
#endif
#ifdef SYS_timer_getoverrun
    case SYS_timer_getoverrun:
#endif
#ifdef SYS_timer_gettime
    case SYS_timer_gettime:
#endif
#ifdef SYS_timer_settime
    case SYS_timer_settime:
#endif
#ifdef SYS_timerfd_create
    case SYS_timerfd_create:
#endif
#ifdef SYS_timerfd_gettime
    case SYS_timerfd_gettime:
#endif
#ifdef SYS_timerfd_settime
    case SYS_timerfd_settime:
#endif
#ifdef SYS_times
    case SYS_times:
#endif
#ifdef SYS_tkill
    case SYS_tkill:
#endif
#ifdef SYS_truncate
    case SYS_truncate:
#endif
#ifdef SYS_umask
    case SYS_umask:
#endif
#ifdef SYS_uname
    case SYS_uname:
#endif
#ifdef SYS_unlink
    case SYS_unlink:
#endif
#ifdef SYS_unlinkat
    case SYS_unlinkat:
#endif
#ifdef SYS_unshare
    case SYS_unshare:
#endif
#ifdef SYS_utime
    case SYS_utime:
#endif
#ifdef SYS_utimensat
    case SYS_utimensat:
#endif
#ifdef SYS_utimes
    case SYS_utimes:
#endif
#ifdef SYS_vfork
    case SYS_vfork:
#endif
#ifdef SYS_vmsplice
    case SYS_vmsplice:
#endif
#ifdef SYS_wait4
    case SYS_wait4:
#endif
#ifdef SYS_waitid
    case SYS_waitid:
#endif
#ifdef SYS_write
    case SYS_write:
#endif
#ifdef SYS_writev
    case SYS_writev:
#endif
        return true;
#ifdef SYS_mount
    case SYS_mount:
#endif
#ifdef SYS_pivot_root
    case SYS_pivot_root:
#endif
#ifdef SYS_sethostname
    case SYS_sethostname:
#endif
#ifdef SYS_setns
    case SYS_setns:
#endif
#ifdef SYS_umount2
    case SYS_umount2:
#endif
        return nested;
    default:
        return false;
    }
}
