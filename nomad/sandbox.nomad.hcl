variable "job_id" {
  type    = string
  default = "agentenv-sandbox"
}
variable "namespace" {
  type    = string
  default = "default"
}
variable "datacenters" {
  type    = list(string)
  default = ["*"]
}
variable "count" {
  type    = number
  default = 1
}
variable "image" {
  type    = string
  default = "agentenv-sandbox:local"
}
variable "slots" {
  type    = number
  default = 10
}
variable "isolation" {
  type    = string
  default = "full"
}
variable "allow_network" {
  type    = bool
  default = false
}
variable "limits" {
  type    = map(number)
  default = {}
}
variable "env" {
  type    = map(string)
  default = {}
}
variable "output_bytes" {
  type    = number
  default = 1048576
}
variable "spare_shells" {
  type    = bool
  default = true
}
variable "cpu_mhz" {
  type    = number
  default = 500
}
variable "memory_mib" {
  type    = number
  default = 2048
}
variable "pids_limit" {
  type    = number
  default = 8192
}
variable "drain_s" {
  type    = number
  default = 300
}
variable "client_data_dir" {
  type    = string
  default = ""
}

locals {
  # Interpolated on the client, hence the second dollar.
  data_dir = var.client_data_dir != "" ? var.client_data_dir : "$${meta.agentenv_data_dir}"
}

job "sandbox" {
  id          = var.job_id
  namespace   = var.namespace
  datacenters = var.datacenters
  type        = "service"

  update { max_parallel = 0 }

  group "sandbox" {
    count = var.count

    # A container that has died is never restarted in place: its slots and their leases are gone, so what
    # replaces it is another allocation, which is another container. The farm has Nomad replace the first
    # ones at once; a crash loop is slowed down by these delays.
    restart {
      attempts = 0
      mode     = "fail"
    }
    reschedule {
      delay          = "5s"
      delay_function = "exponential"
      max_delay      = "2m"
      unlimited      = true
    }

    # Allocations that are to go (a drained node, a lower count) run on for so long, for the leases they
    # have, while their replacements start at once. The farm ends each of them as soon as it is empty.
    shutdown_delay = "${var.drain_s}s"
    migrate {
      max_parallel     = 1000
      health_check     = "task_states"
      min_healthy_time = "1s"
      healthy_deadline = "1m"
    }

    network {
      port "http" { to = 8642 }
    }

    service {
      provider = "nomad"
      name     = var.job_id
      port     = "http"
      check {
        type     = "http"
        path     = "/health"
        interval = "5s"
        timeout  = "3s"
      }
    }

    task "sandbox" {
      driver      = "docker"
      kill_signal = "SIGTERM"
      kill_timeout = "15s"

      config {
        image           = var.image
        force_pull      = false
        ports           = ["http"]
        init            = true
        readonly_rootfs = true
        cgroupns        = "private"
        pids_limit      = var.pids_limit
        cap_drop        = ["all"]
        cap_add         = ["sys_admin", "setuid", "setgid", "setpcap", "kill"]
        security_opt = [
          "no-new-privileges",
          "seccomp=${local.data_dir}/alloc/${NOMAD_ALLOC_ID}/sandbox/local/seccomp.json",
        ]
        mount {
          type   = "tmpfs"
          target = "/run"
          tmpfs_options { size = 16777216 }
        }
      }

      template {
        destination     = "local/spec.json"
        change_mode     = "noop"
        left_delimiter  = "%[["
        right_delimiter = "]]%"
        data = replace(jsonencode({
          container     = "%[[ env `NOMAD_ALLOC_ID` ]]%"
          token_file    = "/secrets/token"
          data_dir      = "/run/agentenv"
          slots         = var.slots
          host          = "0.0.0.0"
          port          = 8642
          isolation     = var.isolation
          allow_network = var.allow_network
          limits        = var.limits
          env           = var.env
          output_bytes  = var.output_bytes
          spare_shells  = var.spare_shells
          uid_block     = "PORT"
        }), "\"PORT\"", "%[[ env `NOMAD_HOST_PORT_http` ]]%")
      }
      template {
        destination = "secrets/token"
        change_mode = "noop"
        perms       = "600"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ .token }}{{ end }}"
      }
      template {
        destination     = "local/seccomp.json"
        change_mode     = "noop"
        left_delimiter  = "%[["
        right_delimiter = "]]%"
        data            = <<-SECCOMP
{
 "defaultAction": "SCMP_ACT_ERRNO",
 "defaultErrnoRet": 1,
 "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []}, {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []}],
 "syscalls": [
  {"names": [
   "accept", "accept4", "access", "adjtimex", "alarm", "bind", "brk", "cachestat", "capget", "capset", "chdir",
   "chmod", "chown", "clock_adjtime", "clock_getres", "clock_gettime", "clock_nanosleep", "close",
   "close_range", "connect", "copy_file_range", "creat", "dup", "dup2", "dup3", "epoll_create", "epoll_create1",
   "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd", "eventfd2", "execve", "execveat",
   "exit", "exit_group", "faccessat", "faccessat2", "fadvise64", "fallocate", "fanotify_mark", "fchdir",
   "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fcntl", "fdatasync", "fgetxattr", "flistxattr",
   "flock", "fork", "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync", "ftruncate", "futex",
   "futex_requeue", "futex_wait", "futex_waitv", "futex_wake", "futimesat", "get_robust_list", "getcpu",
   "getcwd", "getdents", "getdents64", "getegid", "geteuid", "getgid", "getgroups", "getitimer", "getpeername",
   "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getrandom", "getresgid", "getresuid", "getrlimit",
   "getrusage", "getsid", "getsockname", "getsockopt", "gettid", "gettimeofday", "getuid", "getxattr",
   "inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch", "io_cancel", "io_destroy",
   "io_getevents", "io_pgetevents", "io_setup", "io_submit", "ioctl", "ioprio_get", "ioprio_set", "kill",
   "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "lchown", "lgetxattr", "link",
   "linkat", "listen", "listxattr", "llistxattr", "lremovexattr", "lseek", "lsetxattr", "lstat", "madvise",
   "map_shadow_stack", "membarrier", "memfd_create", "memfd_secret", "mincore", "mkdir", "mkdirat", "mknod",
   "mknodat", "mlock", "mlock2", "mlockall", "mmap", "mprotect", "mq_getsetattr", "mq_notify", "mq_open",
   "mq_timedreceive", "mq_timedsend", "mq_unlink", "mremap", "mseal", "msgctl", "msgget", "msgrcv", "msgsnd",
   "msync", "munlock", "munlockall", "munmap", "name_to_handle_at", "nanosleep", "newfstatat", "open", "openat",
   "openat2", "pause", "pidfd_open", "pidfd_send_signal", "pipe", "pipe2", "pkey_alloc", "pkey_free",
   "pkey_mprotect", "poll", "ppoll", "prctl", "pread64", "preadv", "preadv2", "prlimit64", "process_mrelease",
   "process_vm_readv", "process_vm_writev", "pselect6", "ptrace", "pwrite64", "pwritev", "pwritev2", "read",
   "readahead", "readlink", "readlinkat", "readv", "recvfrom", "recvmmsg", "recvmsg", "remap_file_pages",
   "removexattr", "rename", "renameat", "renameat2", "restart_syscall", "rmdir", "rseq", "rt_sigaction",
   "rt_sigpending", "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait",
   "rt_tgsigqueueinfo", "sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity",
   "sched_getattr", "sched_getparam", "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity",
   "sched_setattr", "sched_setparam", "sched_setscheduler", "sched_yield", "seccomp", "select", "semctl",
   "semget", "semop", "semtimedop", "sendfile", "sendmmsg", "sendmsg", "sendto", "set_robust_list",
   "set_tid_address", "setfsgid", "setfsuid", "setgid", "setgroups", "setitimer", "setpgid", "setpriority",
   "setregid", "setresgid", "setresuid", "setreuid", "setrlimit", "setsid", "setsockopt", "setuid", "setxattr",
   "shmat", "shmctl", "shmdt", "shmget", "shutdown", "sigaltstack", "signalfd", "signalfd4", "socketpair",
   "splice", "stat", "statfs", "statx", "symlink", "symlinkat", "sync", "sync_file_range", "syncfs", "sysinfo",
   "tee", "tgkill", "time", "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime",
   "timer_settime", "timerfd_create", "timerfd_gettime", "timerfd_settime", "times", "tkill", "truncate",
   "umask", "uname", "unlink", "unlinkat", "utime", "utimensat", "utimes", "vfork", "vmsplice", "wait4",
   "waitid", "write", "writev"
  ], "action": "SCMP_ACT_ALLOW"},
  {"names": ["clone", "mount", "pivot_root", "sethostname", "setns", "umount2", "unshare"], "action": "SCMP_ACT_ALLOW", "comment": "what a container of slots needs beyond Docker's list"},
  {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38, "comment": "its flags are behind a pointer: callers fall back to clone"},
  {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_NE"}], "comment": "no AF_VSOCK"},
  {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}]},
  {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
  {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 131072, "op": "SCMP_CMP_EQ"}]},
  {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 131080, "op": "SCMP_CMP_EQ"}]},
  {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 4294967295, "op": "SCMP_CMP_EQ"}]},
  {"names": ["arch_prctl", "modify_ldt"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64"]}}
 ]
}
        SECCOMP
      }

      resources {
        cpu    = var.cpu_mhz
        memory = var.memory_mib
      }
    }
  }
}
