"""Phase 1 of a checkpoint: copy the state into host buffers while training continues.

Entry point: `snapshotter.Snapshotter`. `checkpoint_run.CheckpointRun` is the state of one checkpoint on one
rank, from the request to the end. May import `state` and what that imports.
"""
