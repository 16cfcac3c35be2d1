"""What a run writes and how it goes on; no torch."""
