"""Tools of one slot for code: a verifier's context, and sandboxes for scripts and notebooks."""
