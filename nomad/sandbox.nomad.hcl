# A farm's containers: under Docker, as plain processes (raw_exec), under Apptainer, or as virtual machines (vm).
#
# Every container of a farm is one allocation of this job. agentenv registers it (NomadBackend, `agentenv up`);
# by hand, with any Nomad 1.8 or newer:
#
#   nomad var put nomad/jobs/agentenv-sandbox token=$(openssl rand -hex 32)
#   nomad job run nomad/sandbox.nomad.hcl
#   nomad job run -var driver=raw_exec -var 'spec={"slots": 4}' nomad/sandbox.nomad.hcl
#
# docs/nomad.md explains each variable and what clients need. Copy and change this file freely: only the
# group and task name `sandbox`, the port label `http` and the rendered spec are agentenv's contract.

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

variable "node_pool" {
  type    = string
  default = "default"
}

variable "count" {
  type        = number
  default     = 1
  description = "Containers. The farm scales it."
}

variable "driver" {
  type        = string
  default     = "docker"
  description = "What starts containers on clients: docker, raw_exec (plain processes), apptainer, or vm (a virtual machine for each: docs/machines.md)."
}

variable "spec" {
  type        = string
  default     = "{}"
  description = "What each container is, as JSON: the fields of ContainerSpec (src/agentenv/wire/spec.py), such as {\"slots\": 4, \"limits\": {\"memory_bytes\": 1073741824}}. What is not named keeps agentenv's default; by hand, Docker's isolation is then full."
}

variable "drain_s" {
  type        = number
  default     = 300
  description = "Seconds that leases have left when their container is to go, unless the node's drain gives them less."
}

variable "cpu_mhz" {
  type        = number
  default     = 500
  description = "Reserved for each container; it may use more when the client has it."
}

variable "memory_mib" {
  type        = number
  default     = 0
  description = "Reserved for each container, and under Docker its hard limit. Files of slots (workspace, /tmp) are memory and count. 0: enough for all slots to use their limits.memory_bytes (limits.max_memory_bytes, if that is more) at once, and for checkpoint_bytes; with less, a slot can be killed for what its neighbours use."
}

variable "memory_max_mib" {
  type        = number
  default     = 0
  description = "The hard limit instead of memory_mib, where the cluster's scheduler allows memory oversubscription; else Nomad ignores it. 0: none."
}

variable "image" {
  type        = string
  default     = "agentenv-sandbox:local"
  description = "Docker: `agentenv image build NAME` makes it; push it where clients can pull it. A tag `local` is never pulled. Apptainer: the image as a file on every client (apptainer build agentenv-sandbox.sif docker-daemon://agentenv-sandbox:local). vm: a directory on every client (agentenv image machine)."
}

# -- images that slots have as their root (docs/images.md) ----------------------------------------
# With either, Docker's containers are started without no-new-privileges, because setuid programs of images work only so;
# the server gives it up itself.

variable "image_volume" {
  type        = string
  default     = ""
  description = "Docker: the clients' host volume with the image store, which nomad/images.nomad.hcl keeps; mounted read-only. Empty, and image_store too: there are no image slots."
}

variable "image_store" {
  type        = string
  default     = ""
  description = "The image store's directory on clients: raw_exec's, or Docker's with `volumes { enabled = true }`; mounted read-only. Not under Apptainer, and not for machines."
}

variable "unpack_images" {
  type        = bool
  default     = false
  description = "Docker: containers may write one directory of the store, `trees`, where images are unpacked for clients that cannot mount them as they are (Linux before 6.12). With image_volume it is a host volume of its own, whose name has `-trees` at its end; with image_store it is below that."
}

variable "loop_devices" {
  type        = string
  default     = ""
  description = "Docker: the clients' loop devices that containers get, as a range of numbers such as \"64-127\"; one for each slot that has its storage on disk, and one for each checkpoint of such a slot. Every client must have all of them (docs/nomad.md). Empty: storage of slots is memory only."
}

variable "disk_volume" {
  type        = string
  default     = ""
  description = "Docker: with loop_devices, the clients' host volume, on ext4 or xfs, where storage on disk is reserved. Empty: the allocation's directory, on the disk of the clients' data_dir."
}

# -- Docker's own --------------------------------------------------------------------------------

variable "force_pull" {
  type        = bool
  default     = false
  description = "Ask the registry at every start whether the tag has moved."
}

variable "runtime" {
  type        = string
  default     = ""
  description = "Another container runtime of the client's Docker engine, such as gVisor's runsc (allow_runtimes)."
}

variable "apparmor" {
  type        = string
  default     = "unconfined"
  description = "AppArmor profile where clients have AppArmor. Docker's own forbids mounts, so it cannot be that one; without any, capabilities and the seccomp profile hold."
}

variable "userns_mode" {
  type        = string
  default     = "host"
  description = "Where the client's Docker engine maps users (userns-remap): host leaves the container out of it, because a mapped root can neither read its job's token nor make slots. Elsewhere it has no effect. Empty: as the engine is set, and no slot starts on such a client."
}

variable "pids_limit" {
  type        = number
  default     = 0
  description = "All processes and threads of a container. 0: enough for all slots to have their limits.processes at once, and at least 16384; with less, a slot can be refused a process for what its neighbours have."
}

variable "client_data_dir" {
  type        = string
  default     = ""
  description = "The clients' data_dir, below which they find the seccomp profile this job renders. Empty: each client says so itself, in its meta agentenv_data_dir; clients that do not are left out."
}

variable "time_factor" {
  type        = number
  default     = 1
  description = "How many times as long as usual containers may take for their own work: AGENTENV_TIME_FACTOR of what registers the job."
}

# -- the others' own, on every client ---------------------------------------------

variable "python" {
  type        = string
  default     = "/usr/bin/python3"
  description = "raw_exec and vm: a Python 3.11 or newer that has agentenv[sandbox] installed."
}

variable "pythonpath" {
  type        = string
  default     = ""
  description = "raw_exec and vm: where agentenv is found when it is not installed for that Python."
}

variable "data_dir" {
  type        = string
  default     = "/run/agentenv"
  description = "raw_exec: where containers keep what is theirs while they run."
}

variable "apptainer" {
  type    = string
  default = "/usr/bin/apptainer"
}

locals {
  docker      = var.driver == "docker"
  image_slots = var.image_volume != "" || var.image_store != ""

  volumes = { for name, volume in {
    images = { source = var.image_volume, at = "/store", read_only = true }
    trees  = { source = var.unpack_images && var.image_volume != "" ? "${var.image_volume}-trees" : "", at = "/store/trees", read_only = false }
    disk   = { source = var.disk_volume, at = "/disk", read_only = false }
  } : name => volume if local.docker && volume.source != "" }

  loop_devices = flatten([for numbers in compact([var.loop_devices]) :
  [for number in range(split("-", numbers)[0], split("-", numbers)[1] + 1) : "/dev/loop${number}"]])

  # What containers are; the job itself reads some of it, which therefore must be there.
  spec = merge(
    { slots = 10, isolation = local.docker ? "full" : "auto", allow_network = false, closed_networks = [], limits = {}, binds = [] },
    jsondecode(var.spec),
  )

  # What the start of one adds, by driver (SandboxSpec). Template markers are filled on the client.
  launch = {
    docker = {
      token_file = "/secrets/token"
      data_dir   = "/run/agentenv"
      host       = "0.0.0.0"
      port       = 8642
      binds      = [for index, bind in local.spec.binds : { source = "/binds/${index}", target = bind.target }]
      store_dir  = local.image_slots ? "/store" : ""
      disk_dir   = var.disk_volume != "" ? "/disk" : "/alloc/data"
      # Neither the bridge and the containers on it, nor the client.
      closed_networks = concat(["attached", "%[[ env `NOMAD_HOST_IP_http` ]]%/32"], local.spec.closed_networks)
    }
    raw_exec = {
      token_file = "%[[ env `NOMAD_SECRETS_DIR` ]]%/token"
      data_dir   = var.data_dir
      store_dir  = var.image_store
      disk_dir   = "%[[ env `NOMAD_ALLOC_DIR` ]]%/data"
      host       = "%[[ env `NOMAD_IP_http` ]]%"
      port       = "@HOST_PORT@"
    }
    vm = {
      token_file = "%[[ env `NOMAD_SECRETS_DIR` ]]%/token"
      data_dir   = var.data_dir
      host       = "%[[ env `NOMAD_IP_http` ]]%"
      port       = "@HOST_PORT@"
    }
    apptainer = {
      token_file = "/secrets/token"
      data_dir   = "/tmp/agentenv"
      host       = "%[[ env `NOMAD_IP_http` ]]%"
      port       = "@HOST_PORT@"
    }
  }[var.driver]

  # What agentenv reserves by default too (reserved_mib of slots/backends/nomad/job.py): a container never meets its
  # limit before its slots and its checkpoints have met theirs.
  slot_mib       = ceil(max(try(local.spec.limits.memory_bytes, 2147483648), try(local.spec.limits.max_memory_bytes, 0)) / 1048576)
  checkpoint_mib = ceil(try(local.spec.checkpoint_bytes, 4294967296) / 1048576)
  memory_mib     = var.memory_mib > 0 ? var.memory_mib : local.spec.slots * local.slot_mib + local.checkpoint_mib + 512
  # Likewise (enough_pids); what a slot has beside its own is its agent, its bwrap and its network.
  pids_limit = var.pids_limit > 0 ? var.pids_limit : max(16384, local.spec.slots * (try(local.spec.limits.processes, 400) + 10) + 512)
  # Interpolated on the client, hence the second dollar.
  client_data_dir = var.client_data_dir != "" ? var.client_data_dir : "$${meta.agentenv_data_dir}"
}

job "sandbox" {
  id          = var.job_id
  namespace   = var.namespace
  datacenters = var.datacenters
  node_pool   = var.node_pool
  type        = "service"

  # No deployments: while one is active Nomad refuses to scale.
  update { max_parallel = 0 }

  group "sandbox" {
    count = var.count

    # Docker's engine reads the seccomp profile: a client that says where its data is has been prepared for this job.
    dynamic "constraint" {
      for_each = local.docker && var.client_data_dir == "" ? ["is_set"] : []
      content {
        attribute = "$${meta.agentenv_data_dir}"
        operator  = constraint.value
      }
    }

    # A container that has died is never restarted in place: its slots and their leases are gone, so what
    # replaces it is another allocation, which is another container. The farm has Nomad replace the first
    # ones at once; these growing delays slow a crash loop down, and a client that cannot run it is left.
    restart {
      attempts = 0
      mode     = "fail"
    }
    reschedule {
      unlimited      = true
      delay          = "5s"
      delay_function = "exponential"
      # Whatever kept containers from starting, a minute after it is cured the farm is whole again.
      max_delay = "45s"
    }
    # An allocation that is to go (its node is drained, the count is lowered) runs on for so long, for the
    # leases it has, while its replacement starts at once. The farm ends it as soon as it is empty; by hand:
    # `nomad job stop -no-shutdown-delay`.
    shutdown_delay = "${var.drain_s}s"
    migrate {
      max_parallel     = 1000
      health_check     = "task_states"
      min_healthy_time = "1s"
      healthy_deadline = "1m"
    }

    ephemeral_disk { size = 64 } # MiB: logs; a container keeps nothing on disk

    dynamic "volume" {
      for_each = local.volumes
      labels   = [volume.key]
      content {
        type      = "host"
        source    = volume.value.source
        read_only = volume.value.read_only
      }
    }

    network {
      port "http" { to = local.docker ? 8642 : 0 } # 0: the same as outside
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
      driver = local.docker ? "docker" : "raw_exec"

      kill_signal  = "SIGTERM" # stops in order, within seconds
      kill_timeout = "15s"

      logs {
        max_files     = 3
        max_file_size = 8
      }

      # One of the four.
      dynamic "config" {
        for_each = local.docker ? ["docker"] : []
        content {
          image      = var.image
          force_pull = var.force_pull
          ports      = ["http"]
          runtime    = var.runtime

          # A real init reaps; the root file system is the image's and stays so; what it writes is in memory.
          init            = true
          readonly_rootfs = true
          mount = concat(
            [{ type = "tmpfs", target = "/run", tmpfs_options = [{ size = 16777216 }] }],
            [for index, bind in local.spec.binds :
            { type = "bind", source = bind.source, target = "/binds/${index}", readonly = true }],
            [for store in compact([var.image_volume == "" ? var.image_store : ""]) :
            { type = "bind", source = store, target = "/store", readonly = true }],
            [for store in compact([var.image_volume == "" && var.unpack_images ? var.image_store : ""]) :
            { type = "bind", source = "${store}/trees", target = "/store/trees", readonly = false }],
          )
          devices = [for path in concat(local.spec.allow_network ? ["/dev/net/tun"] : [], local.loop_devices) :
          { host_path = path, container_path = path, cgroup_permissions = "rw" }]

          # What making slots takes, and nothing else; the server gives up even this (docs/isolation.md).
          cap_drop = ["all"]
          cap_add  = ["sys_admin", "setuid", "setgid", "setpcap", "kill"]
          security_opt = concat(local.image_slots ? [] : ["no-new-privileges"], [
            "apparmor=${var.apparmor}",
            "seccomp=${local.client_data_dir}/alloc/${NOMAD_ALLOC_ID}/sandbox/local/seccomp.json",
          ])
          cgroupns    = "private"
          userns_mode = var.userns_mode
          pids_limit  = local.pids_limit
        }
      }

      # The same process as on a laptop. It does what Docker does otherwise: a pid and a mount namespace of
      # its own, cgroups, uids. When Nomad kills it, the kernel ends everything in it.
      dynamic "config" {
        for_each = var.driver == "raw_exec" ? ["raw_exec"] : []
        content {
          command = var.python
          args    = ["-P", "-s", "-m", "agentenv.sandbox", "${NOMAD_TASK_DIR}/spec.json"]
        }
      }
      # The same in a guest of QEMU's, which has nothing of the client but the one port.
      dynamic "config" {
        for_each = var.driver == "vm" ? ["vm"] : []
        content {
          command = var.python
          args    = ["-P", "-s", "-m", "agentenv.sandbox.machine", "${NOMAD_TASK_DIR}/spec.json", "--image", var.image]
        }
      }
      dynamic "env" {
        for_each = contains(["raw_exec", "vm"], var.driver) ? [var.driver] : []
        content {
          PYTHONPATH           = var.pythonpath
          AGENTENV_TIME_FACTOR = var.time_factor
        }
      }
      dynamic "env" {
        for_each = var.driver == "apptainer" && var.time_factor != 1 ? ["apptainer"] : []
        content {
          APPTAINERENV_AGENTENV_TIME_FACTOR = var.time_factor # --cleanenv passes on what has this prefix
        }
      }
      dynamic "env" { # a task has one block `env`: where there is nothing to say it is free for a copy of this file
        for_each = var.driver == "docker" && var.time_factor != 1 ? ["docker"] : []
        content {
          AGENTENV_TIME_FACTOR = var.time_factor
        }
      }

      # Apptainer starts the image's server as the user who runs the Nomad client. --contain keeps the host's
      # home and /tmp out; /run is memory; slots make their namespaces inside.
      dynamic "config" {
        for_each = var.driver == "apptainer" ? ["apptainer"] : []
        content {
          command = var.apptainer
          args = [
            "exec", "--containall", "--no-home", "--cleanenv", "--pid", "--writable-tmpfs",
            "--bind", "${NOMAD_TASK_DIR}:/local:ro",
            "--bind", "${NOMAD_SECRETS_DIR}:/secrets:ro",
            "--env", "PYTHONPATH=/opt/agentenv",
            var.image,
            "/usr/bin/python3", "-P", "-s", "-m", "agentenv.sandbox", "/local/spec.json",
          ]
        }
      }

      dynamic "volume_mount" {
        for_each = local.volumes
        content {
          volume      = volume_mount.key
          destination = volume_mount.value.at
          read_only   = volume_mount.value.read_only
        }
      }

      # What the container is asked to be: the file its supervisor reads. The host port is unique on a client, so
      # it names the uids of the container's slots; it is a number, which only the client knows.
      template {
        destination     = "local/spec.json"
        change_mode     = "noop"
        left_delimiter  = "%[["
        right_delimiter = "]]%"
        data = replace(
          jsonencode(merge(local.spec, { container = "%[[ env `NOMAD_ALLOC_ID` ]]%", uid_block = "@HOST_PORT@" }, local.launch)),
          "\"@HOST_PORT@\"", "%[[ env `NOMAD_HOST_PORT_http` ]]%",
        )
      }

      # The token: never in an argument, an environment or the job itself.
      template {
        destination = "secrets/token"
        change_mode = "noop"
        perms       = "600"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ .token }}{{ end }}"
      }

      # docker/seccomp.json, word for word (a test compares): here, so that nothing is copied to clients.
      dynamic "template" {
        for_each = local.docker ? ["docker"] : []
        content {
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
  {"names": ["chroot", "fsconfig", "fsmount", "fsopen", "mount_setattr", "move_mount", "open_tree"], "action": "SCMP_ACT_ALLOW", "comment": "what a container of slots needs for image slots"},
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
      }

      resources {
        cpu        = var.cpu_mhz
        memory     = local.memory_mib
        memory_max = var.memory_max_mib
      }
    }
  }
}
