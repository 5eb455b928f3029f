"""Endpoints: each is declared once, with its access rule and what the documentation says about it.

    router = Router("/api/v1/jobs/{job}", tag="control")

    @router.endpoint("GET", "/desired", access=VIEW, returns=Desired, errors={404: "No such job"})
    def read(job: str, db: Db) -> Response: ...

The authorization, the OpenAPI document with its examples, the reference and the routing derive from these
declarations. FastAPI resolves the parameters of the functions. A plain function runs in a thread of the class that
its router names; a coroutine function runs in the event loop, and must not read or write the database itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import params
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_server.api.openapi import JSON, answers_of, request_body
from holdfast_server.core.access import MAX_FORM_BYTES, AccessRule, RouteMatch
from holdfast_server.db.request_threads import RequestClass
from holdfast_server.http.services import services_of

F = TypeVar("F", bound=Callable[..., Any])
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class Endpoint(APIRoute):
    """A function with its method, path and access rule."""

    method: str
    access: AccessRule
    threads: RequestClass | None
    """Class of the threads that run the function; `None` for a coroutine function."""
    max_body_bytes: int

    def __init__(
        self,
        method: str,
        path: str,
        function: Callable[..., Any],
        access: AccessRule,
        threads: RequestClass,
        max_body_bytes: int,
        **route: Any,
    ) -> None:
        is_asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        self.method = method
        self.access = access
        self.max_body_bytes = max_body_bytes
        self.threads = None if is_asynchronous else threads
        super().__init__(
            path,
            function if is_asynchronous else _in_thread(function, threads),
            methods=[method],
            **route,
        )
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        takes_the_request = [parameter.annotation for parameter in parameters] == [Request]
        if self.threads is None and takes_the_request and not self.dependencies:
            # What FastAPI prepares for parameters and dependencies would take time on every batch.
            self.app = _called_with_request(function)


class MountedApp(Mount):
    """An application that answers all requests below a path."""

    method = "GET"
    max_body_bytes = MAX_FORM_BYTES

    def __init__(self, path: str, app: ASGIApp, access: AccessRule) -> None:
        super().__init__(path, app=app)
        self.access = access


class Router:
    """The endpoints of one area.

    Args:
        prefix: what their paths begin with.
        tag: their heading in the reference; pages have none and are not in it.
        threads: the class of the threads that run them; by default, `pages` without a tag, and `answers` with one.
        dependencies: of each of them.
    """

    def __init__(
        self,
        prefix: str = "",
        *,
        tag: str | None = None,
        threads: RequestClass | None = None,
        dependencies: Sequence[params.Depends] = (),
    ) -> None:
        self.endpoints: list[Endpoint] = []
        self._prefix = prefix
        self._tag = tag
        self._threads: RequestClass = threads or ("pages" if tag is None else "answers")
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
        threads: RequestClass | None = None,
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
            threads: the class of the threads that run it; by default, that of the router.
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
                    threads or self._threads,
                    max_body_bytes,
                    status_code=status,
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


def _called_with_request(function: Callable[[Request], Coroutine[Any, Any, Response]]) -> ASGIApp:
    """Return an application that only calls a function; the handlers of the whole application take its errors."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await function(Request(scope, receive, send))
        await response(scope, receive, send)

    return answer


def _in_thread(function: Callable[..., Any], threads: RequestClass) -> Callable[..., Any]:
    """Return a coroutine function with the parameters of a plain one, which it runs in a thread."""
    signature = inspect.signature(function, eval_str=True)
    parameters = dict(signature.parameters)
    # FastAPI passes the request to one parameter only
    wanted = [name for name, parameter in parameters.items() if parameter.annotation is Request]
    served = wanted[0] if wanted else "served"
    parameters.setdefault(served, inspect.Parameter(served, inspect.Parameter.KEYWORD_ONLY, annotation=Request))

    async def run(**named: Any) -> Any:
        database = services_of(named[served].app).database
        arguments = named if wanted else {name: value for name, value in named.items() if name != served}
        return await database.ask(threads, partial(function, **arguments))

    run.__signature__ = signature.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    return run


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
        self._without_parameters: dict[tuple[str, str], EndpointMatch] = {}
        self._below = [
            route for route in self.routes if isinstance(route, MountedApp) or route.path.endswith(":path}")
        ]
        self.access: dict[tuple[str, str], AccessRule] = {}
        """The authorization table: the access rule by method and path."""
        for route in self.routes:
            if (route.method, route.path) in self.access:
                raise ValueError(f"two endpoints are declared as {route.method} {route.path}")
            self.access[route.method, route.path] = route.access
            if isinstance(route, Endpoint):
                self._by_shape.setdefault((route.method, route.path.count("/")), []).append(route)
                if "{" not in route.path:
                    changes = {"endpoint": route.endpoint, "path_params": {}, "route": route}  # as `matches` has
                    self._without_parameters[route.method, route.path] = _matched(route, changes)
        self._methods = sorted({route.method for route in self.routes})

    @property
    def endpoints(self) -> Iterator[Endpoint]:
        return (route for route in self.routes if isinstance(route, Endpoint))

    def find(self, method: str, path: str) -> EndpointMatch | None:
        """Return the endpoint of this very path, or the first one that matches. HEAD finds that of GET."""
        method = "GET" if method == "HEAD" else method
        if (whole := self._without_parameters.get((method, path))) is not None:
            return whole
        scope = {"type": "http", "method": method, "path": path}
        candidates: list[Endpoint | MountedApp] = [*self._by_shape.get((method, path.count("/")), ())]
        for route in candidates + [below for below in self._below if below.method == method]:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return _matched(route, found)
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


def _matched(route: Endpoint | MountedApp, changes: Mapping[str, Any]) -> EndpointMatch:
    job, project = (changes["path_params"].get(name) for name in ("job", "project"))
    return EndpointMatch(
        route.path, route.access, job, project, route, changes, max_body_bytes=route.max_body_bytes
    )


def table_of(app: Starlette) -> EndpointTable:
    """Return the endpoints of an application."""
    return next(route for route in app.routes if isinstance(route, EndpointTable))


def check_routes(app: Starlette) -> None:
    """Raise RuntimeError for a route that bypasses the endpoints, because it has no access rule."""
    for route in app.routes:
        if not isinstance(route, EndpointTable):
            raise RuntimeError(f"{route} has no access rule: declare it with @router.endpoint(...)")
