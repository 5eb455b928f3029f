"""What every other package may import: settings, errors, encoding, the bus, request ids, principals,
access rules.

Imports no other package of the server.
"""
