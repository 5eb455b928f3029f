"""`holdfast run`: restart a trainer, find hangs, clean up its processes, commit what a crash left in memory.

Entry point: `supervisor.run`. Never imports torch or the session.
"""
