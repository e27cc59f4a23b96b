"""Real issues of real repositories, scored by the tests that came with their solution."""
