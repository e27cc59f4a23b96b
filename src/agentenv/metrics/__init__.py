"""What pool and executor count, for Prometheus: read when scraped, free when nobody asks for it."""
