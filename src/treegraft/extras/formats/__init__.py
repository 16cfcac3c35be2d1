"""Trees in the formats of other projects."""
