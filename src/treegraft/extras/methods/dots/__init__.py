"""DOTS: training tasks that the agent solves about half of the time."""
