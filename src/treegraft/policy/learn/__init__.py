"""The packed learner: trees at the price of their unique tokens."""
