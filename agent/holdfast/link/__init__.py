"""The connection to the server. It never blocks training, raises into it, or grows without bound."""

from holdfast.link.link import Link, NoLink

__all__ = ["Link", "NoLink"]
