"""The smallest useful environment."""
