"""Studies: which settings are tried, by whom, and what came out."""
