"""Which node has which image, and which fetches one: decided by ``placement``, performed by the nodes' keepers."""
