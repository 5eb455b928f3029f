"""The documentation as pages of the server, with a search. `make docs` builds them; a wheel contains them.

Entry point: `routes.router`. May import `shared`.
"""
