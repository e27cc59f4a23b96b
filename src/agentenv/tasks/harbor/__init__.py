"""Task directories of Harbor and Terminal-Bench, played in image slots."""
