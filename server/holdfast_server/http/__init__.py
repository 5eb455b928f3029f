"""HTTP around the routes: services, dependencies, authorization, access log, metrics, security headers.

May import `accounts`, `ingest` and what these import.
"""
