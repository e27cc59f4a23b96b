"""A cluster on this machine: installs, starts and stops the nomad program, a Docker engine and one Nomad agent."""

from __future__ import annotations

HTTP_PORT = 4646
"""Nomad's default port for its API."""
