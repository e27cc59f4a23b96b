"""A cluster on this machine: the nomad program, a Docker engine, one Nomad agent, and their end."""
