"""Comparisons of methods, and their scripts."""
