"""The comparison of jobs, forks and lineages on one chart.

Entry point: `routes.router`; `views` has the view, `plot` the geometry of the charts. May import `shared`.
"""
