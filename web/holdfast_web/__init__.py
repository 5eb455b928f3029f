"""The dashboard: pages and fragments rendered by the server, and the static files that they use."""

from holdfast_web.assets import static_app

__all__ = ["static_app"]
