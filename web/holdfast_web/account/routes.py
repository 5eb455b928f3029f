"""The account page."""

from __future__ import annotations

from fastapi.responses import Response

from holdfast_server.api.account import AskedAccount
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import LISTS
from holdfast_server.http.dependencies import Asker, Config, Db, Now
from holdfast_server.queries import fleet
from holdfast_server.queries.account import account
from holdfast_web.account import views

router = Router()


@router.endpoint(
    "GET",
    "/account",
    access=LISTS,  # the query checks the projects
)
def account_page(db: Db, asker: Asker, now: Now, config: Config, asked: AskedAccount) -> Response:
    with db.read() as session:
        found = account(session, asked, config.prices, now=now)
    return views.account_page(found, asked, fleet.projects_of(db, asker.visible_projects)).response()
