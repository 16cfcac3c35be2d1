"""Speed of the engine, the learner, whole updates and the Step-Trace Buffer: `python -m
benchmarks.speed`."""
