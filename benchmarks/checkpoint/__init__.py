"""Comparison of Holdfast with other libraries that checkpoint a training loop: `make bench-checkpoint`."""
