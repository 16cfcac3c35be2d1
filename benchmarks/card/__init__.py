"""What fifteen minutes of one GPU can show: `python -m benchmarks.card`."""
