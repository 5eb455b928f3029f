"""Incremental checkpoints: of tensors in which few rows change, only these rows are written.

The first of such checkpoints writes a *base file* with whole tensors. Each later one links it, and the *region
files* with the rows that changed since; readers lay them over each other (`layered_file.py`).
"""
