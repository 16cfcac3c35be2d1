"""The python tool: two sandboxes behind one interface."""
