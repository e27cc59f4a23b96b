"""A farm as a job of a Nomad cluster."""
