"""Recipes: slots under harnesses that have no entry point for them (docs/harnesses.md). Copy the file that you need."""
