"""The browse tool: pages fetched with limits, and the passages that matter."""
