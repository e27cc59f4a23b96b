"""The smallest environment of the terminal tool."""
