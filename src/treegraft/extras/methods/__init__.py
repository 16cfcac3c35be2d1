"""Methods of other papers, and our own commit branching: one file each."""
