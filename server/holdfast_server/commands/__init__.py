"""Commands on the server's machine. They use the database directly and need only the permission to open it."""
