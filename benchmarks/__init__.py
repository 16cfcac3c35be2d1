"""Measurements: ours and a peer, taking turns in one run."""
