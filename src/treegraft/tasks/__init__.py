"""Where questions come from, and how answers are judged."""
