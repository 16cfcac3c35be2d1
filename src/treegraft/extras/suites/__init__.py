"""Evaluation sets of the papers: an agent measured on them, judged, and compared with another."""
