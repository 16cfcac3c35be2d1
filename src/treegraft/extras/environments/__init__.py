"""Environments of other packages, and Sokoban."""
