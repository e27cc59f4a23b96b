"""A cluster on this machine: installs, starts and stops the nomad program, a Docker engine and one Nomad agent.

For development: it is not in the wheel (``docs/decisions/0060``).
"""
