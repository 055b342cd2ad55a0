"""Cells, the fast recurrence, layers and models, independent of configs, corpora and files."""
