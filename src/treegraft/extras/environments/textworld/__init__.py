"""TextWorld: its Treasure Hunter as tasks, and the environment that it is played in."""
