"""Studies, reports and profiles: experiments, and what they say."""
