"""Trackers beside TensorBoard."""
