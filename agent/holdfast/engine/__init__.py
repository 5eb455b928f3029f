"""What happens at the boundary between two iterations, and the life of a session.

`Boundary` settles, measures, decides and acts; `decide` is a pure function; `Lifecycle` is the session's state.
"""
