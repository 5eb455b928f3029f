"""The list of all jobs, and changes to several jobs at once.

Entry point: `routes.router`; `context` has the views. To add a column, edit `_rows.html` and `context.py`.
May import `shared`.
"""
