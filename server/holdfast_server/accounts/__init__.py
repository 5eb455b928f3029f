"""People, keys, and what they may do."""
