"""The resumable data loader: order, workers, position, and the probe that measures loading.

Entry point: `loader.DataLoader`. May import `state.rng`, `distributed` and `system`; knows nothing of
checkpoints or servers.
"""
