"""The page of one checkpoint: its cost, retention, verification, comparison and forks.

Entry point: `routes.router`; `context` has the views. May import `job` and `shared`.
"""
