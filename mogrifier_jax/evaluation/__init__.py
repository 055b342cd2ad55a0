"""Scores and text of trained runs, and the trained model for Python."""
