"""The local web viewer and its counterpart in a terminal. They read run folders and nothing
else."""
