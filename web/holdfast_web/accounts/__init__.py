"""Signing in and out, the first set-up, and password links.

Entry point: `routes.router`. May import `shared`.
"""
