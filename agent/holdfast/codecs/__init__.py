"""Codecs: functions from bytes to bytes.

Entry points: `parity.encode` and `parity.recover`, the erasure code of parity files; `planes.encode` and
`planes.decode`, byte planes of numbers. No files, no state of training. Imports NumPy and Zstandard and nothing of
Holdfast; what uses it imports it only where something is encoded or decoded.
"""
