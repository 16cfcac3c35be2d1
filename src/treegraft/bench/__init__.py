"""Benchmarks: ours and what users would pick instead, alternating in one run."""
