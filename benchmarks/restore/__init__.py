"""How fast a job is back: after a SIGKILL, in place, after an order, and out of memory rather than off a disk."""
