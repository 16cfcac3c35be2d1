"""Agents measured on held-out tasks or asked, and checks of data before any of it is used."""
