"""The methods' mathematics: pure functions, one family per file."""
