"""Endpoints: each is declared once, with its access rule and what the documentation says about it.

    router = Router("/api/v1/jobs/{job}", tag="control")

    @router.endpoint("GET", "/desired", access=VIEW, returns=Desired, errors={404: "No such job"})
    async def read(job: str, db: Db) -> Response: ...

The authorization, the OpenAPI document with its examples, the reference and the routing derive from these
declarations. FastAPI resolves the parameters of the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import params
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_server.api.openapi import JSON, answers_of, request_body
from holdfast_server.core.access import AccessRule, RouteMatch

F = TypeVar("F", bound=Callable[..., Any])
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]

MAX_FORM_BYTES = 2**20
"""Largest body of an endpoint that declares no limit."""


class Endpoint(APIRoute):
    """A function with its method, path and access rule."""

    method: str
    access: AccessRule

    def __init__(
        self, method: str, path: str, function: Callable[..., Any], access: AccessRule, **route: Any
    ) -> None:
        super().__init__(path, function, methods=[method], **route)
        self.method = method
        self.access = access


class MountedApp(Mount):
    """An application that answers all requests below a path."""

    method = "GET"

    def __init__(self, path: str, app: ASGIApp, access: AccessRule) -> None:
        super().__init__(path, app=app)
        self.access = access


class Router:
    """The endpoints of one area.

    Args:
        prefix: what their paths begin with.
        tag: their heading in the reference; pages have none and are not in it.
        dependencies: of each of them.
    """

    def __init__(
        self, prefix: str = "", *, tag: str | None = None, dependencies: Sequence[params.Depends] = ()
    ) -> None:
        self.endpoints: list[Endpoint] = []
        self._prefix = prefix
        self._tag = tag
        self._dependencies = dependencies

    def endpoint(
        self,
        method: Method,
        path: str,
        *,
        access: AccessRule,
        body: Any = None,
        returns: Any = None,
        status: int = 200,
        success: str = "Success",
        errors: Mapping[int, str] | None = None,
        media_type: str = JSON,
        example: Any = None,
        max_body_bytes: int = MAX_FORM_BYTES,
        response_class: type[Response] = JSONResponse,
        dependencies: Sequence[params.Depends] = (),
    ) -> Callable[[F], F]:
        """Declare the decorated function as the endpoint of a method and path.

        Args:
            access: the clients that may use it.
            body: type of the JSON body.
            returns: type of the answer.
            status: status code of the answer.
            success: what the answer means.
            errors: further status codes and what they mean. Those that all endpoints share are added.
            media_type: of the answer.
            example: of the answer; by default, JSON has one that follows from the type.
            response_class: what FastAPI makes the answer from, if the function returns no `Response`.
        """
        documented = self._tag is not None

        def declare(function: F) -> F:
            self.endpoints.append(
                Endpoint(
                    method,
                    self._prefix + path,
                    function,
                    access,
                    status_code=status,
                    max_body_size=max_body_bytes,
                    response_class=response_class,
                    dependencies=[*self._dependencies, *dependencies],
                    include_in_schema=documented,
                    tags=[self._tag] if documented else [],
                    responses=answers_of(returns, status, success, errors, media_type, example)
                    if documented
                    else {},
                    openapi_extra=None if body is None else request_body(body),
                )
            )
            return function

        return declare


@dataclass(frozen=True, slots=True)
class EndpointMatch(RouteMatch):
    """The endpoint of a request."""

    route: Endpoint | MountedApp
    changes: Mapping[str, Any]
    """What the route adds to the scope of the request."""


class EndpointTable(BaseRoute):
    """All endpoints, as the only route of the application.

    The outermost middleware searches for the endpoint of a request, for the log, the authorization and this route,
    which calls it.
    """

    def __init__(self, routes: Iterable[Endpoint | MountedApp]) -> None:
        self.routes = tuple(routes)
        self._by_shape: dict[tuple[str, int], list[Endpoint]] = {}
        self._mounts = [route for route in self.routes if isinstance(route, MountedApp)]
        self.access: dict[tuple[str, str], AccessRule] = {}
        """The authorization table: the access rule by method and path."""
        for route in self.routes:
            if (route.method, route.path) in self.access:
                raise ValueError(f"two endpoints are declared as {route.method} {route.path}")
            self.access[route.method, route.path] = route.access
            if isinstance(route, Endpoint):
                self._by_shape.setdefault((route.method, route.path.count("/")), []).append(route)
        self._methods = sorted({route.method for route in self.routes})

    @property
    def endpoints(self) -> Iterator[Endpoint]:
        return (route for route in self.routes if isinstance(route, Endpoint))

    def find(self, method: str, path: str) -> EndpointMatch | None:
        """Return the first endpoint that matches. HEAD finds that of GET."""
        method = "GET" if method == "HEAD" else method
        scope = {"type": "http", "method": method, "path": path}
        candidates: list[Endpoint | MountedApp] = [*self._by_shape.get((method, path.count("/")), ())]
        for route in candidates + [mount for mount in self._mounts if mount.method == method]:
            match, changes = route.matches(scope)
            if match is Match.FULL:
                named = changes["path_params"]
                return EndpointMatch(
                    route.path, route.access, named.get("job"), named.get("project"), route, changes
                )
        return None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        match: EndpointMatch | None = scope["state"]["route"]
        if match is None:
            methods = [method for method in self._methods if self.find(method, scope["path"])]
            raise HTTPException(405, headers={"Allow": ", ".join(methods)}) if methods else HTTPException(404)
        scope.update(match.changes)
        await match.route.handle(scope, receive, send)


def table_of(app: Starlette) -> EndpointTable:
    """Return the endpoints of an application."""
    return next(route for route in app.routes if isinstance(route, EndpointTable))


def check_routes(app: Starlette) -> None:
    """Raise RuntimeError for a route that bypasses the endpoints, because it has no access rule."""
    for route in app.routes:
        if not isinstance(route, EndpointTable):
            raise RuntimeError(f"{route} has no access rule: declare it with @router.endpoint(...)")
