"""Kernels of our own for a CPU: C sources, made once per machine, and how they are compiled and
loaded."""
