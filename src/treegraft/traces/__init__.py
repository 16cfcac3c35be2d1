"""The Step-Trace Buffer: kept, searched, filled."""
