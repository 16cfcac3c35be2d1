"""Worlds as examples of environments: a file has tasks, what they are played in, and an expert."""
