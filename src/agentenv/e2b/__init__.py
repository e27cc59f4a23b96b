"""E2B's HTTP API over a farm: programs that are written for E2B's SDKs run on its slots (docs/e2b.md).

The control plane is ours. What happens in a sandbox (processes, terminals, files, watching) is done by E2B's own
daemon, ``envd``, which runs in the slot, and to which requests are passed on.
"""
