"""The local web viewer and its counterpart in a terminal. They only read run folders."""
