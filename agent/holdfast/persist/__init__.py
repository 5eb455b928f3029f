"""Phase 2 of a checkpoint: write a snapshot to the store in the background and commit it on all ranks.

Entry point: `persister.Persister`. May import
`snapshot.checkpoint_run`, `store`, `format`, `system` and `distributed`, but not torch.
"""
