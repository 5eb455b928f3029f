"""The objects of a training loop as tensors and a JSON tree, and back.

Entry point: `registry.Registry`, which keeps an adapter for each object of a session. May import `format`,
`system`, `distributed` and `torch_internals`; knows nothing of files or checkpoints.
"""
