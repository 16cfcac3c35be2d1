"""A run on a Ray cluster: the same update, from engines on many machines."""
