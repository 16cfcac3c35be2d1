"""Stored trajectories without the steps that did nothing, and their command."""
