"""The list of all jobs, and changes to several jobs at once.

Entry point: `routes.router`; `views` has the views. To add a column, edit `_rows.html` and `views.py`.
May import `shared`.
"""
