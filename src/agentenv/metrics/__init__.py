"""Prometheus metrics of pool and executor, collected only when scraped."""
