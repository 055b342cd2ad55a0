"""What a run will cost on chips that are not here."""
