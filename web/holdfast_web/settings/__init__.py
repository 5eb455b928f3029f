"""The pages under /settings: a person's own account, keys, people and projects.

Entry point: `routes.router`; `views` has the views. May import `accounts` and `shared`.
"""
