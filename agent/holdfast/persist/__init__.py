"""Phase 2 of a checkpoint: write a snapshot to the store in the background and commit it on all ranks.

Entry point: `persister.Persister`. Writes in a thread or in a helper process. May import
`snapshot.checkpoint_run`, `store`, `format`, `system` and `distributed`, but not torch.
"""
