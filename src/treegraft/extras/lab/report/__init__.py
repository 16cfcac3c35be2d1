"""Reports: figures and tables of runs."""
