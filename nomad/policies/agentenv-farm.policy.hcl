# What the farm service (farm.nomad.hcl) needs of Nomad's ACLs. Given to that one job, as its workload identity, so
# that it needs no token of its own:
#   nomad acl policy apply -namespace default -job agentenv-farm agentenv-farm agentenv-farm.policy.hcl
# Name your namespace, and the containers' job if it is not agentenv-sandbox.

namespace "default" {
  capabilities = [
    "list-jobs",       # the job's allocations of earlier incarnations
    "read-job",        # allocations, evaluations, the event stream
    "parse-job",       # the job file is HCL with variables
    "submit-job",      # register the job
    "scale-job",       # more and fewer containers
    "alloc-lifecycle", # replace a broken container, cut a finished drain short
    "read-logs",       # why a container did not start
  ]

  variables {
    path "nomad/jobs/agentenv-sandbox" { # the containers' bearer token
      capabilities = ["list", "read", "write", "destroy"]
    }
    path "nomad/jobs/agentenv-sandbox/owner" { # who owns the job, under a lock
      capabilities = ["list", "read", "write", "destroy"]
    }
  }
}

node {
  policy = "read" # drains are seen before Nomad acts on them
}
