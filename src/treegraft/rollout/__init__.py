"""Growing trees: the loop, the tree under construction, and the formats."""
