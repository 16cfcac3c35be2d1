"""Trackers beside TensorBoard and Weights & Biases."""
