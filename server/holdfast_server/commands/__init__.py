"""Commands on the server's machine: they ask the database, not the server, and need no right but to open it."""
