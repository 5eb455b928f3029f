"""Restore benchmarks: after SIGKILL, in place, by request, and from memory instead of disk."""
