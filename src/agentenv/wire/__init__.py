"""The vocabulary both sides of a container share."""
