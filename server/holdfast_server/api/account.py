"""The account: use of GPU time and storage, losses by cause, and the work that checkpoints saved."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query
from starlette.responses import Response

from holdfast.protocol.account import Account, AccountKey, AccountWindow
from holdfast_server.api.endpoints import Router
from holdfast_server.api.exports import CSV
from holdfast_server.api.responses import Json
from holdfast_server.core.access import LISTS
from holdfast_server.http.dependencies import Asker, Config, Db, Now
from holdfast_server.queries.account import AccountQuery, account, account_csv

router = Router("/api/v1", tag="account")

DEFAULT_WINDOW: AccountWindow = "24h"


async def account_query(
    asker: Asker,
    since: Annotated[AccountWindow, Query(description="the window, which ends now")] = DEFAULT_WINDOW,
    by: Annotated[AccountKey, Query(description="what the rows are grouped by")] = "project",
    project: str = "",
    owner: str = "",
    label: Annotated[str, Query(description="labels that all match, separated by commas: `team: vision`")] = "",
    store: Annotated[str, Query(description="address of the store")] = "",
) -> AccountQuery:
    """Return the query of an address, where an empty filter is unset."""
    return AccountQuery(
        window=since,
        by=by,
        project=project or None,
        owner=owner.strip() or None,
        labels=tuple(one for one in (part.strip() for part in label.split(",")) if one),
        store=store or None,
        visible_projects=asker.visible_projects,
    )


AskedAccount = Annotated[AccountQuery, Depends(account_query)]


@router.endpoint(
    "GET",
    "/account",
    access=LISTS,  # the query checks the projects
    returns=Account,
    errors={422: "Invalid window, rows or label"},
)
def get_account(db: Db, now: Now, config: Config, asked: AskedAccount) -> Response:
    """Sum GPU-hours by cause, saved work and bytes by project, owner, label, store or job."""
    with db.read() as session:
        return Json(account(session, asked, config.prices, now=now))


@router.endpoint(
    "GET",
    "/account.csv",
    access=LISTS,  # the query checks the projects
    returns=str,
    success="The file",
    errors={422: "Invalid window, rows or label"},
    media_type=CSV,
    example="project,jobs,gpu_hours\r\nvision,12,384.5\r\n",
    response_class=Response,
)
def get_account_csv(db: Db, now: Now, config: Config, asked: AskedAccount) -> Response:
    """Export all rows of the account."""
    with db.read() as session:
        found = account(session, asked, config.prices, now=now, most_rows=None)
    headers = {"Content-Disposition": f'attachment; filename="account-by-{asked.by}-{asked.window}.csv"'}
    return Response(account_csv(found), media_type=CSV, headers=headers)
