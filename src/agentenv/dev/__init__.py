"""A cluster on this machine: the nomad program, a Docker engine, one Nomad agent, and their end."""

from __future__ import annotations

HTTP_PORT = 4646
"""Nomad's own, where a cluster's API listens unless told otherwise."""
