"""The audit log as a page, and as CSV and JSON files.

Entry point: `routes.router`. May import `shared`.
"""
