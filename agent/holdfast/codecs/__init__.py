"""Codecs between bytes and bytes, without I/O."""
