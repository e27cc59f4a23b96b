"""The keeper of a node's image store: fetches images for the farm, and serves them to other nodes."""
