"""Data, seams and errors that every other part may use; imports nothing of the rest."""
