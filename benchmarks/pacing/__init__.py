"""Pacing benchmarks: overhead and budget, reactions of the controller, plans, the ETTR formula."""
