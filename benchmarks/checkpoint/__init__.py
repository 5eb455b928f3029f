"""Holdfast beside the other libraries that checkpoint a training loop: `make bench-checkpoint`."""
