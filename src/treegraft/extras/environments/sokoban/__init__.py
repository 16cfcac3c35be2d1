"""Sokoban: boards with a shortest solution, and the environment that they are played in."""
