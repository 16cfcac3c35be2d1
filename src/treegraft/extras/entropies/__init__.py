"""Exact entropies where vLLM's V2 runner draws."""
