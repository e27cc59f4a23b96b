# The image keeper (`agentenv images serve`) on every node of a farm: it fetches images into the node's store, which the
# farm's containers mount read-only (variable image_volume of sandbox.nomad.hcl). It alone has the network and the
# registries' credentials, and it is an ordinary process: no capability, no other user's rights.
#
#   (umask 077; openssl rand -hex 32 > keeper.token)
#   nomad var put nomad/jobs/agentenv-images token=@keeper.token auth=@auth.json
#   nomad job run -var image=registry.example.com/agentenv-farm:1 nomad/images.nomad.hcl
#
# `token` is what the farm service and all keepers share ([images] keeper_token_file of its settings). `auth` has the
# registries' credentials, as `docker login` and `skopeo login` write them; the default is anonymous access.
# Every client needs the store as a host volume, on a disk of its own if it can be, owned by the keeper's user:
#
#   client { host_volume "agentenv-images" { path = "/var/lib/agentenv/store" } }

variable "job_id" {
  type    = string
  default = "agentenv-images"
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

variable "driver" {
  type        = string
  default     = "docker"
  description = "docker or raw_exec."
}

variable "image" {
  type        = string
  default     = "agentenv-farm:local"
  description = "Docker: an image with agentenv and skopeo in it, such as FROM python:3.13-slim, RUN apt-get update && apt-get install -y skopeo zstd && pip install agentenv."
}

variable "user" {
  type        = string
  default     = "65534:65534"
  description = "Docker: user of the keeper's process, and owner of the store."
}

variable "command" {
  type        = string
  default     = "agentenv"
  description = "The program `agentenv`: in the image, or with raw_exec its path on clients."
}

variable "volume" {
  type        = string
  default     = "agentenv-images"
  description = "Docker: the clients' host volume with the store."
}

variable "store" {
  type        = string
  default     = "/var/lib/agentenv/store"
  description = "raw_exec: the store's directory on clients."
}

variable "port" {
  type        = number
  default     = 8643
  description = "On every node; [images] keeper_port of the farm's settings."
}

variable "budget_gib" {
  type        = number
  default     = 200
  description = "What the store may keep; what was not used for longest goes first."
}

variable "args" {
  type        = list(string)
  default     = []
  description = "More arguments of `agentenv images serve`: --registry, --mirror, --pulls and so on."
}

variable "cpu_mhz" {
  type    = number
  default = 500
}

variable "memory_mib" {
  type    = number
  default = 1024
}

locals {
  docker = var.driver == "docker"
  args = concat([
    "images", "serve",
    "--store", local.docker ? "/store" : var.store,
    "--host", local.docker ? "0.0.0.0" : "${NOMAD_IP_http}",
    "--port", "${var.port}",
    "--token-file", "${NOMAD_SECRETS_DIR}/token",
    "--auth-file", "${NOMAD_SECRETS_DIR}/auth.json",
    "--peers-file", "${NOMAD_TASK_DIR}/peers",
    "--budget", "${var.budget_gib}",
  ], var.args)
}

job "images" {
  id          = var.job_id
  namespace   = var.namespace
  datacenters = var.datacenters
  node_pool   = var.node_pool
  type        = "system"

  group "images" {
    restart {
      attempts = 10
      interval = "5m"
      delay    = "2s"
      mode     = "delay"
    }

    dynamic "volume" {
      for_each = local.docker ? ["store"] : []
      labels   = ["store"]
      content {
        type      = "host"
        source    = var.volume
        read_only = false
      }
    }

    network {
      port "http" {
        static = var.port
      }
    }

    service {
      provider = "nomad"
      name     = var.job_id
      port     = "http"
      check {
        type     = "http"
        path     = "/health"
        interval = "10s"
        timeout  = "3s"
      }
    }

    task "images" {
      driver = var.driver
      user   = local.docker ? var.user : ""

      kill_signal  = "SIGTERM"
      kill_timeout = "15s"

      logs {
        max_files     = 3
        max_file_size = 16
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
      dynamic "volume_mount" {
        for_each = local.docker ? ["store"] : []
        content {
          volume      = "store"
          destination = "/store"
          read_only   = false
        }
      }

      # The other nodes' keepers, read again by the keeper itself.
      template {
        destination = "local/peers"
        change_mode = "noop"
        data        = "{{ range nomadService `${var.job_id}` }}http://{{ .Address }}:{{ .Port }}\n{{ end }}"
      }

      # Of the keeper's user: it is not root, and nobody else reads the directory `secrets`.
      template {
        destination = "secrets/token"
        perms       = "444"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ .token }}{{ end }}"
      }
      template {
        destination = "secrets/auth.json"
        change_mode = "noop"
        perms       = "444"
        data        = "{{ with nomadVar (print `nomad/jobs/` (env `NOMAD_JOB_ID`)) }}{{ with .auth.Value }}{{ . }}{{ else }}{}{{ end }}{{ end }}"
      }

      resources {
        cpu    = var.cpu_mhz
        memory = var.memory_mib
      }
    }
  }
}
