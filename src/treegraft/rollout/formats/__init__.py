"""Formats: how steps become tokens and back."""
