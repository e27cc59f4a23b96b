# Has every client pull the image before a farm needs it: one short task on each, then it is over. A task that
# fails names the client that cannot have the image.
#
#   nomad job run -var image=registry.example.com/agentenv-sandbox:1 nomad/prepull.nomad.hcl
#
# An image that is there already is not pulled again, unless force_pull asks the registry.

variable "job_id" {
  type    = string
  default = "agentenv-prepull"
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

variable "image" {
  type    = string
  default = "agentenv-sandbox:local"
}

variable "force_pull" {
  type    = bool
  default = false
}

job "prepull" {
  id          = var.job_id
  namespace   = var.namespace
  datacenters = var.datacenters
  node_pool   = var.node_pool
  type        = "sysbatch"

  group "prepull" {
    restart {
      attempts = 2
      interval = "5m"
      delay    = "5s"
      mode     = "fail"
    }

    ephemeral_disk { size = 16 }

    task "prepull" {
      driver = "docker"

      logs {
        max_files     = 1
        max_file_size = 1
      }

      # The image's own program would want a specification; all that counts is that it could be started.
      config {
        image              = var.image
        force_pull         = var.force_pull
        image_pull_timeout = "30m"
        entrypoint         = ["/bin/true"]
        network_mode       = "none"
        readonly_rootfs    = true
        cap_drop           = ["all"]
      }

      resources {
        cpu    = 10
        memory = 32
      }
    }
  }
}
