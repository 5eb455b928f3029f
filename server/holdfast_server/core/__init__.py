"""What every other package may import: settings, errors, encoding, the bus, request ids, principals.

Imports no other package of the server.
"""
