"""Task directories of Harbor and Terminal-Bench 2, played in image slots."""
