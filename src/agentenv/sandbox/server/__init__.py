"""The unprivileged half of a container: HTTP on one side, the slots' agents on the other."""
