"""Sources of tasks other than data sets and the search world."""
