"""What tools there are, and their schemas."""
