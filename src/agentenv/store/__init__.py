"""The image store of a node: everything that reads, writes, pulls, builds and indexes images."""
