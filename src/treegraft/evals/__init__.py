"""Evaluation suites, their scores and reports, and checks of data before any of it is used."""
