"""Model Context Protocol servers as sets of tools."""
