"""Environments: one state for each trajectory, copied or replayed at branches."""
