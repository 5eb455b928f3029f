"""What a checkpoint of thousands of ranks costs the rank that commits it: `make bench-ranks`."""
