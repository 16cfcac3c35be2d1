"""Figures and tables of finished, running and copied runs."""
