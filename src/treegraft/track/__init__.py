"""Where metrics go beside metrics.jsonl."""
