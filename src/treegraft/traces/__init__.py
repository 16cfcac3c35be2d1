"""The Step-Trace Buffer: stored, searched, filled."""
