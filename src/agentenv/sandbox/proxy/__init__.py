"""The proxy of slots whose network is an allow list: their only way out, in a process of its own."""
