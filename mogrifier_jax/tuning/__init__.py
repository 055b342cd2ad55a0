"""Studies: which settings are tried, the workers that try them, and the report."""
