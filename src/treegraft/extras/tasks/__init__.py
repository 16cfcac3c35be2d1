"""Sources of tasks beside data sets and the search world."""
