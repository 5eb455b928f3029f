"""The alert pages: open alerts, rules and channels of a project.

Entry point: `routes.router`; `context` has the views. May import `shared`.
"""
