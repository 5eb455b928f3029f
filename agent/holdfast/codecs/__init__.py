"""Codecs: functions from bytes to bytes, such as the erasure code of parity files.

Entry points: `parity.encode` and `parity.recover`. No files, no state of training. Imports NumPy and nothing of
Holdfast; what uses it imports it only where parity is computed.
"""
