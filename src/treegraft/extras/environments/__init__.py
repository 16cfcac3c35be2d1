"""Environments of servers and of other packages."""
