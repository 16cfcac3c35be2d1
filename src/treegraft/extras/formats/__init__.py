"""The markup of other projects' agents."""
