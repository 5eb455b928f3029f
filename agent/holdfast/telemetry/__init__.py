"""What a job reports to the server: iteration times, metrics, its environment.

Entry point: `reporter.Reporter`. May import `server_link`, `pacing`, `distributed` and `store`.
"""
