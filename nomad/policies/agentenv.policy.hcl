# What a farm needs of Nomad's ACLs: trainers (NomadBackend) and operators (`agentenv up | status | logs | gc`).
#   nomad acl policy apply -description "agentenv farms" agentenv agentenv.policy.hcl
#   nomad acl token create -name trainers -policy agentenv -type client      → NOMAD_TOKEN
# Never with -namespace: that attaches it to every job there, which could then run commands in the farm's slots.
# Name your namespace below where it says "default". For somebody who only looks, leave out what is marked (write).

namespace "default" {
  capabilities = [
    "list-jobs",       # status, gc
    "read-job",        # allocations, evaluations, the event stream
    "parse-job",       # the job file is HCL with variables
    "submit-job",      # (write) register and purge the job
    "scale-job",       # (write) more and fewer containers
    "alloc-lifecycle", # (write) replace a broken container, cut a finished drain short
    "read-logs",       # why a container did not start; `agentenv logs`
  ]

  variables {
    # Each job's bearer token, the mark of farms that are to stay, and (nomad/jobs/<job>/owner) who owns it, under a
    # lock: without write no farm is opened.
    path "nomad/jobs/*" {
      capabilities = ["list", "read", "write", "destroy"]
    }
  }
}

node {
  policy = "read" # drains are seen before Nomad acts on them; `status` shows nodes by name
}
