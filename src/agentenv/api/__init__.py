"""HTTP services: the tool server and the shared farm."""
