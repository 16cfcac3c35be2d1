"""Where a tree grows: decisions only, no tokens and no I/O."""
