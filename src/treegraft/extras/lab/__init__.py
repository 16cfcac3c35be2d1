"""Studies and reports: experiments, and what they say."""
