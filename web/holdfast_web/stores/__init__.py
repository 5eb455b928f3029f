"""The stores that jobs share: who writes how much, what waits, and the limit.

Entry point: `routes.router`. May import `shared`.
"""
