"""ScienceWorld: its games as tasks, and the environment that they are played in."""
