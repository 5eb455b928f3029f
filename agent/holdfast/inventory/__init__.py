"""A watch for state that a script uses or changes and that no checkpoint holds.

Switch it off with `HOLDFAST_DISABLE=inventory`: a job trains, resumes and reports without it.
"""
