# A whole cluster in one process on one machine: `make nomad-dev`. For development and tests only: no
# ACLs, listens on loopback. data_dir and ports are given by agentenv.dev (a second file beside this).
name      = "agentenv-dev"
log_level = "WARN"
bind_addr = "127.0.0.1"

# Loopback must be said in so many words.
advertise {
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}

disable_update_check = true
leave_on_interrupt   = true
leave_on_terminate   = true

server {
  enabled          = true
  bootstrap_expect = 1
}

client {
  enabled = true
  servers = ["127.0.0.1"]
  # Containers answer on loopback; nothing of a development cluster is reachable from outside.
  network_interface = "lo"
  # A stopped allocation's directory goes at once: nothing is left behind.
  gc_interval              = "10s"
  gc_max_allocs            = 20
  options = {
    # Clouds' metadata is of no use here, and asking for it can stop the start (AWS_CA_BUNDLE).
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }
}

plugin "docker" {
  config {
    # What the sandbox job asks for, and nothing else (docs/nomad.md says why each).
    allow_caps = ["sys_admin", "setuid", "setgid", "setpcap", "kill"]
    volumes { enabled = false }
    gc {
      image     = false
      container = true
    }
    extra_labels = ["job_name", "task_group_name", "task_name", "alloc_id"]
  }
}

plugin "raw_exec" {
  config { enabled = true }
}
