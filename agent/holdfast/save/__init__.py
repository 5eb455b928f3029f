"""Saving: copy the state of one instant while training goes on, write it, and commit it on all ranks.

Entry point: `saver.Saver`; `run.Run` is one checkpoint on its way. May import `checkpoint`, `telemetry`, `state`,
`store`, `distributed`, `format` and `system`. What a crash commit needs imports no torch.
"""
