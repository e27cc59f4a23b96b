"""Agent programs that others have written repair real packages, in slots without network."""
