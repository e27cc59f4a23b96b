"""A farm as its operators see it: which there are, what runs, what is left over. Below the command, and any page."""
