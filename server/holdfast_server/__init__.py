"""The service: API, database, control. It knows no torch."""
