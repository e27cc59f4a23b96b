# The farm service (`agentenv farm serve`) as a Nomad job, over containers that are the allocations of another job,
# which it registers and scales (sandbox.nomad.hcl).
#
#   nomad var put nomad/jobs/agentenv-farm key=$(openssl rand -hex 32) settings=@farm.toml
#   nomad acl policy apply -namespace default -job agentenv-farm agentenv-farm nomad/policies/agentenv-farm.policy.hcl
#   nomad job run -var image=registry.example.com/agentenv-farm:1 nomad/farm.nomad.hcl
#
# `settings` is the service's settings file; with `backend = "nomad"` and `key_files = ["../secrets/farm.key"]` under
# [tokens], which is where this job puts `key`. Of the settings, those that may change while the service runs do so
# when the variable is written; the others need `nomad job restart`. The policy is for clusters with ACLs.
#
# For clients that cannot reach the containers, run `agentenv farm relay` where both can be reached, and give its address
# as `relay_url` in the settings (docs/farm.md).
#
# Whatever happens to the service, containers and their leases stay. One allocation at a time owns the containers' job;
# with count = 2 the other is a standby, and takes over within some 25 s when the owner's node is lost.

variable "job_id" {
  type    = string
  default = "agentenv-farm"
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
  description = "2: a hot standby on another node."
}

variable "driver" {
  type        = string
  default     = "docker"
  description = "docker or raw_exec."
}

variable "image" {
  type        = string
  default     = "agentenv-farm:local"
  description = "Docker: an image with agentenv[sandbox,farm] installed, such as FROM python:3.13-slim, RUN pip install 'agentenv[sandbox,farm]'."
}

variable "command" {
  type        = string
  default     = "agentenv"
  description = "The program `agentenv`: in the image, or with raw_exec its path on clients."
}

variable "port" {
  type        = number
  default     = 8700
  description = "On every node the service runs on. 0: one that Nomad chooses, which clients find by the name of the service."
}

variable "service" {
  type        = string
  default     = "agentenv-farm"
  description = "Its name in Nomad's service catalogue: clients' farm_url is nomad://agentenv-farm then."
}

variable "nomad_address" {
  type        = string
  default     = ""
  description = "Nomad's HTTP API as seen from the service. Empty: that of the node's own agent, which must not listen on loopback only."
}

variable "cpu_mhz" {
  type    = number
  default = 500
}

variable "memory_mib" {
  type    = number
  default = 512
}

locals {
  docker = var.driver == "docker"
  args   = ["farm", "serve", "--config", "${NOMAD_TASK_DIR}/farm.toml", "--host", "0.0.0.0", "--port", "${NOMAD_PORT_http}", "--url", "http://${NOMAD_ADDR_http}"]
  # Interpolated on the client, hence the second dollar.
  nomad_address = var.nomad_address != "" ? var.nomad_address : "http://$${attr.unique.network.ip-address}:4646"
}

job "farm" {
  id          = var.job_id
  namespace   = var.namespace
  datacenters = var.datacenters
  node_pool   = var.node_pool
  type        = "service"

  # A standby is healthy as well, though not ready: its task runs.
  update {
    max_parallel     = 1
    health_check     = "task_states"
    min_healthy_time = "2s"
    healthy_deadline = "1m"
  }

  group "farm" {
    count = var.count

    constraint {
      operator = "distinct_hosts"
      value    = "true"
    }

    # In place and at once: then the service is the owner again without waiting for the lock of its predecessor.
    restart {
      attempts = 10
      interval = "5m"
      delay    = "1s"
      mode     = "delay"
    }
    # On a node that is cut off it cannot own the job for longer than this either.
    disconnect {
      lost_after = "30s"
    }
    migrate {
      max_parallel     = 1
      health_check     = "task_states"
      min_healthy_time = "2s"
      healthy_deadline = "1m"
    }
    # Clients learn that the address is going before it does.
    shutdown_delay = "2s"

    ephemeral_disk { size = 128 } # MiB: logs

    network {
      port "http" {
        static = var.port
      }
    }

    service {
      provider = "nomad"
      name     = var.service
      port     = "http"
      check {
        type     = "http"
        path     = "/ready" # a standby is not
        interval = "5s"
        timeout  = "3s"
      }
    }

    task "farm" {
      driver = var.driver

      kill_signal  = "SIGTERM"
      kill_timeout = "15s"

      logs {
        max_files     = 3
        max_file_size = 16
      }

      # NOMAD_TOKEN: what the policy gives this job.
      identity {
        env = true
      }
      env {
        NOMAD_ADDR         = local.nomad_address
        AGENTENV_STATE_DIR = "${NOMAD_TASK_DIR}/state"
      }

      # One of the two.
      dynamic "config" {
        for_each = local.docker ? ["docker"] : []
        content {
          image           = var.image
          entrypoint      = [var.command]
          args            = local.args
          ports           = ["http"]
          init            = true
          readonly_rootfs = true
          mount           = [{ type = "tmpfs", target = "/tmp" }]
          cap_drop        = ["all"]
          security_opt    = ["no-new-privileges"]
        }
      }
      dynamic "config" {
        for_each = var.driver == "raw_exec" ? ["raw_exec"] : []
        content {
          command = var.command
          args    = local.args
        }
      }

      # The service looks at its settings file itself.
      template {
        destination = "local/farm.toml"
        change_mode = "noop"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ .settings }}{{ end }}"
      }

      # Signs the tokens of runs. A new key needs a restart.
      template {
        destination = "secrets/farm.key"
        change_mode = "noop"
        perms       = "600"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ .key }}{{ end }}"
      }

      resources {
        cpu    = var.cpu_mhz
        memory = var.memory_mib
      }
    }
  }
}
