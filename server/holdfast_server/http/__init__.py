"""HTTP around the routes: dependencies, access log, metrics, security headers, the API reference.

May import `accounts`, `ingest` and what these import.
"""
