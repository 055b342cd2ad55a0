"""Cells, the fast recurrence, layers and models: no configs, corpora or files are known here."""
