# A farm's containers as plain processes (raw_exec): clusters without Docker.
#
# Every container of a farm is one allocation of this job. agentenv registers it (NomadBackend, `agentenv up`);
# by hand, with any Nomad 1.8 or newer:
#
#   nomad var put nomad/jobs/agentenv-sandbox token=$(openssl rand -hex 32)
#   nomad job run nomad/sandbox-raw-exec.nomad.hcl
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

variable "slots" {
  type        = number
  default     = 10
  description = "Slots of each container."
}

variable "isolation" {
  type        = string
  default     = "auto"
  description = "full: refuse to start as anything less. auto, user: see docs/isolation.md."
}

variable "allow_network" {
  type        = bool
  default     = false
  description = "Slots reach the outside through slirp4netns; the client needs /dev/net/tun."
}

variable "closed_networks" {
  type        = list(string)
  default     = []
  description = "With allow_network: IPv4 networks (as 10.0.0.0/8) that slots must not reach, beside the client's own addresses."
}

variable "limits" {
  type        = map(number)
  default     = {}
  description = "Of each slot: processes, memory_bytes, workspace_bytes, workspace_inodes, tmp_bytes, shm_bytes, open_files, cpu_weight. What is not named keeps agentenv's default."
}

variable "binds" {
  type        = list(object({ source = string, target = string }))
  default     = []
  description = "Directories or files of the client, shown read-only in every slot."
}

variable "env" {
  type        = map(string)
  default     = {}
  description = "Extra environment of every command in a slot."
}

variable "output_bytes" {
  type        = number
  default     = 1048576
  description = "Cap on each of stdout and stderr of a call."
}

variable "spare_shells" {
  type    = bool
  default = true
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
  description = "What the scheduler counts for each container; with raw_exec Nomad does not enforce it: limits.memory_bytes does, for each slot. 0: enough for all slots."
}

variable "python" {
  type        = string
  default     = "/usr/bin/python3"
  description = "On every client: a Python 3.11 or newer that has agentenv[sandbox] installed."
}

variable "pythonpath" {
  type        = string
  default     = ""
  description = "Where agentenv is found when it is not installed for that Python."
}

variable "data_dir" {
  type        = string
  default     = "/run/agentenv"
  description = "On every client: where containers keep what is theirs while they run."
}

locals {
  # What agentenv reserves by default too (SERVER_MIB of its nomad_job.py): a container never meets its limit before
  # its slots have met theirs.
  slot_mib   = ceil(lookup(var.limits, "memory_bytes", 2147483648) / 1048576)
  memory_mib = var.memory_mib > 0 ? var.memory_mib : var.slots * local.slot_mib + 512
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

    network {
      port "http" {}
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
      driver = "raw_exec"

      kill_signal  = "SIGTERM" # stops in order, within seconds
      kill_timeout = "15s"

      logs {
        max_files     = 3
        max_file_size = 8
      }

      # The same process as on a laptop. It does what Docker does otherwise: a pid and a mount namespace of
      # its own, cgroups, uids. When Nomad kills it, the kernel ends everything in it.
      config {
        command = var.python
        args    = ["-P", "-s", "-m", "agentenv.sandbox", "${NOMAD_TASK_DIR}/spec.json"]
      }

      env {
        PYTHONPATH = var.pythonpath
      }

      # What the container is asked to be (src/agentenv/wire/spec.py). The host port is unique on a client, so
      # it names the uids of the container's slots.
      template {
        destination     = "local/spec.json"
        change_mode     = "noop"
        left_delimiter  = "%[["
        right_delimiter = "]]%"
        data = replace(jsonencode({
          container       = "%[[ env `NOMAD_ALLOC_ID` ]]%"
          token_file      = "%[[ env `NOMAD_SECRETS_DIR` ]]%/token"
          data_dir        = var.data_dir
          host            = "%[[ env `NOMAD_IP_http` ]]%"
          port            = "@HOST_PORT@"
          uid_block       = "@HOST_PORT@"
          slots           = var.slots
          isolation       = var.isolation
          allow_network   = var.allow_network
          closed_networks = var.closed_networks
          limits          = var.limits
          binds           = var.binds
          env             = var.env
          output_bytes    = var.output_bytes
          spare_shells    = var.spare_shells
        }), "\"@HOST_PORT@\"", "%[[ env `NOMAD_HOST_PORT_http` ]]%")
      }

      # The token: never in an argument, an environment or the job itself.
      template {
        destination = "secrets/token"
        change_mode = "noop"
        perms       = "600"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ .token }}{{ end }}"
      }

      resources {
        cpu    = var.cpu_mhz
        memory = local.memory_mib
      }
    }
  }
}
