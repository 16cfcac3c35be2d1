"""Stored trajectories without the steps that did nothing."""
