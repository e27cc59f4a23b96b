"""A task that needs a secret the policy must never see."""
