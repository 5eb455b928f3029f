"""Operations on stored checkpoints: load, verify, export, fork, pin and remove.

Entry points: `restore.load` for a resume, `verification` for `holdfast store verify`,
`retention_queue.RetentionQueue` for what is deleted. May import `telemetry`, `store`, `format` and `system`.
"""
