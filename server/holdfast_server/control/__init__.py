"""Requests of operators: budget, interval, restore, retention, deletion; with previews and plans.

The pages and the HTTP API call these functions and hold no rules of their own. May import `queries`, `accounts`,
`records` and what these import.
"""
