"""The search tool: corpora, indexes, encoders, services."""
