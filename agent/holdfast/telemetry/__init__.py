"""What a job reports to the server: iteration times, metrics, checkpoint events, its environment.

Entry point: `reporter.Reporter`. May import `server_link`, `pacing`, `distributed`, `store` and
`snapshot.checkpoint_run`.
"""
