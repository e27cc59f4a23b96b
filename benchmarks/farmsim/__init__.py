"""A farm in simulated time: the real ledger and scale policy, everything else made up."""
