"""Checkpoints and their model cards, uploaded to a hub."""
