"""What a run will cost on chips that this machine does not have."""
