"""The farm service: one farm of slots for many training runs."""
