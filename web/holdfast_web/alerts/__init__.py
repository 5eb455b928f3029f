"""The alert pages: open alerts, rules and channels of a project.

Entry point: `routes.router`; `views` has the views. May import `shared`.
"""
