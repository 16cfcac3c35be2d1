"""Engines: token ids in, more token ids out."""
