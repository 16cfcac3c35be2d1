"""Environments and tasksets of the package verifiers."""
