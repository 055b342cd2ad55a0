"""Sweeps, gates, losses and pictures of trained runs."""
