"""The client of one container: leases, the stream of calls, attachments, files. Knows no pool and no executor."""
