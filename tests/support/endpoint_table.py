"""The endpoints of the server and its dashboard, with their access rules."""

from __future__ import annotations

from holdfast_server.api.endpoints import table_of
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app

ENDPOINTS = table_of(create_app(ServerSettings(database="unused")))
