"""The newest snapshot of a job in shared memory, where it outlives the trainer.

Entry point: `tier.MemoryTier`, used under `holdfast run`. May import `save` and what it imports.
"""
