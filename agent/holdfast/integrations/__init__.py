"""Adapters for training frameworks, loggers and tracing, each in a module that imports its framework.

An adapter creates a `Session` from the objects of a framework, calls `session.step` at the end of each update, and
saves what only the framework knows: its loops, its callbacks and its position in the data. It may import the
session and everything below it; no other package of the agent imports it.
"""
