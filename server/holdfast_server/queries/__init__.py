"""Read models for the API and the pages: fleet, summary, timeline, goodput, ranks, exports.

They change nothing. May import `records`, `samples`, `db`, `models` and `core`.
"""
