"""The page of one checkpoint: its cost, retention, verification, comparison and forks.

Entry point: `routes.router`; `views` has the views. May import `job` and `shared`.
"""
