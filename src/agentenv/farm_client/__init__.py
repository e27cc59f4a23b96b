"""The client of a farm service: which farm, requests to it, and a pool whose slots it grants."""
