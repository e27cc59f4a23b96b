"""The privileged half of a container: it starts, limits and resets the slots, and has no network."""
