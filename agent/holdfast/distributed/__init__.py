"""The ranks of a job: process groups, messages between ranks, and errors that cross processes.

Entry point: `ranks.Ranks`, made by the session from `torch.distributed`. A job of one process has one rank and
no group. May import `errors` and `torch_internals`.
"""
