"""How runs and loops of one's own begin."""
