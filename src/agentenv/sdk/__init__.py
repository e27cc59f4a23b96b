"""Programming interfaces to one slot: the context given to verifiers, and sandboxes for scripts and notebooks."""
