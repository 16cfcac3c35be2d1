"""Data sets inspected before use: defects, duplicates, and questions of evaluation sets."""
