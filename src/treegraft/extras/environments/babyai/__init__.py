"""BabyAI: its levels as tasks, and the environment that they are played in."""
