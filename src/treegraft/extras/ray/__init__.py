"""A run on a Ray cluster: the same update, from engines and growers on many machines."""
