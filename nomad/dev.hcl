# A Nomad agent for development and tests: no ACLs, no TLS, listens on loopback only. `make nomad-dev` runs it
# with a second file that sets its role (server, client or both), its data_dir and its ports. By hand:
# nomad agent -dev -config nomad/dev.hcl, then: nomad node meta apply agentenv_data_dir=<its data_dir>
log_level = "WARN"
bind_addr = "127.0.0.1"

# Loopback must be named explicitly.
advertise {
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}

disable_update_check = true
leave_on_interrupt   = true
leave_on_terminate   = true

server {
  # On a busy machine an agent that starts again is late to report: its containers are not marked lost so soon.
  heartbeat_grace = "60s"
}

client {
  # Containers answer on loopback; nothing of a development cluster is reachable from outside.
  network_interface = "lo"
  # Stopped allocations' directories go soon: a farm starts and stops many.
  gc_interval   = "10s"
  gc_max_allocs = 20
  options = {
    # Clouds' metadata is of no use here, and asking for it can stop the start (AWS_CA_BUNDLE).
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }
}

plugin "docker" {
  config {
    # What the sandbox job requires, and nothing else (docs/nomad.md gives the reasons).
    allow_caps = ["sys_admin", "setuid", "setgid", "setpcap", "kill"]
    # Binds of the job (ContainerSettings.binds) are mounts of this machine's paths.
    volumes { enabled = true }
    gc {
      image     = false
      container = true
      # It takes the containers of another agent on this machine for lost ones, and kills them.
      dangling_containers { enabled = false }
    }
    extra_labels = ["job_name", "task_group_name", "task_name", "alloc_id"]
  }
}

plugin "raw_exec" {
  config { enabled = true }
}
