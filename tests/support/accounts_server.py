"""A test server with accounts, and helpers that create people, sign-ins and tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from holdfast_server import models
from holdfast_server.accounts import passwords, people, projects, sign_ins, tokens
from holdfast_server.accounts.sign_ins import Visitor
from holdfast_server.core.principal import OPERATOR, Role, Scope
from holdfast_server.db import Database
from holdfast_server.http.auth_middleware import COOKIE

T = TypeVar("T")
# These tests hash passwords hundreds of times: 1 MiB and a millisecond each, not 64 MiB and a quarter of a second.
passwords.hasher = PasswordHash([Argon2Hasher(time_cost=1, memory_cost=1024, parallelism=1)])

BASE_URL = "http://127.0.0.1:7117"
OURS = {"Origin": BASE_URL}
"""What a browser says of a form on our own pages."""
PASSWORD = "a sentence of some words"
OWN, OTHER = "vision", "speech"
"""Project in which the users have roles, and one in which they have none; each has a job of its name."""


def browser_at(client: TestClient, address: str) -> TestClient:
    """A browser at an address, without cookies, of the server that `client` has started."""
    browser = TestClient(
        client.app, base_url=BASE_URL, follow_redirects=False, client=(address, 50_000), headers=OURS
    )
    browser.portal = client.portal  # the loop that the server's database runs in
    return browser


class AccountsServer:
    """Server with accounts; its methods do what an admin does on the pages."""

    def __init__(self, client: TestClient, clock: Callable[[], float]) -> None:
        self.client = client
        self.clock = clock
        self.db: Database = client.app.state.services.database  # type: ignore[attr-defined]

    def ask(self, work: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        """Await it in the event loop of the server."""
        assert self.client.portal is not None
        return self.client.portal.call(lambda: work(*arguments, **named))

    def write(self, work: Callable[[Session], T]) -> T:
        return self.db.write(work)

    def read(self, work: Callable[[Session], T]) -> T:
        with self.db.read() as session:
            return work(session)

    def project(self, name: str, *jobs: str) -> None:
        projects.add(self.db, name, who="test", now=self.clock())

        def add_jobs(session: Session) -> None:
            for job in jobs:
                session.add(
                    models.JobRecord(name=job, project=name, created_at=self.clock(), last_contact_at=self.clock())
                )

        self.write(add_jobs)

    def person(self, name: str, role: Role | None = None, *, project: str = OWN, admin: bool = False) -> str:
        people.add(self.db, name, admin=admin, who="test", now=self.clock())
        if role is not None:
            people.set_role(self.db, name, project, role, who="test", now=self.clock())
        return name

    def person_with_password(self, name: str, role: Role | None = None, *, admin: bool = False) -> str:
        self.person(name, role, admin=admin)
        link = people.reset_link(self.db, name, who="test", now=self.clock())
        people.choose_password(self.db, link, PASSWORD, now=self.clock())
        return name

    def cookie(self, person: str) -> dict[str, str]:
        """Return the headers of a browser in which `person` is signed in."""
        visitor = Visitor(address="10.0.0.1", browser="a browser")
        secret = sign_ins.begin(self.db, person, visitor, by="password", now=self.clock())
        return {"Cookie": f"{COOKIE}={secret}"}

    def key(self, *scopes: Scope, project: str | None = OWN, job: str | None = None, name: str = "a key") -> str:
        wish = tokens.TokenRequest(name=name, scopes=scopes, project=project, job=job)
        maker = replace(OPERATOR, name="test")
        secret, _ = tokens.create(self.db, wish, maker=maker, now=self.clock())
        return secret

    def bearer(self, *scopes: Scope, project: str | None = OWN, job: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key(*scopes, project=project, job=job)}"}

    def sign_in(self, name: str, password: str = PASSWORD, **fields: str) -> Any:
        return self.client.post("/login", data={"name": name, "password": password, **fields}, headers=OURS)
