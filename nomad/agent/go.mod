// Builds the nomad program where there is none: `go build -mod=mod github.com/hashicorp/nomad`.
// A module of its own, so that nothing else here is Go. The replace lines are Nomad's own.
module agentenv/nomad/agent

go 1.26

tool github.com/hashicorp/nomad

require (
	github.com/hashicorp/nomad v1.11.3
	github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
)

replace (
	github.com/Microsoft/go-winio => github.com/endocrimes/go-winio v0.4.13-0.20190628114223-fb47a8b41948
	github.com/hashicorp/hcl => github.com/hashicorp/hcl v1.0.1-nomad-1
)
