"""Leasing slots: ledger and scaling decide, the pool performs, backends run containers."""
