"""What a kind of channels is, and where it is registered.

Other packages add kinds as entry points of the group `holdfast.alert_channels`:

    [project.entry-points."holdfast.alert_channels"]
    acme = "my_package:AcmeChannel"

Each names a subclass of `ChannelKind`. The server loads them when it first needs a kind.
"""

from __future__ import annotations

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

from holdfast_server.alerts import egress
from holdfast_server.alerts.messages import AlertMessage
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.errors import InvalidSetting, WebhooksDisabled

logger = logging.getLogger(__name__)

K = TypeVar("K", bound="type[ChannelKind]")
GROUP = "holdfast.alert_channels"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A message to one channel."""

    message: AlertMessage
    target: str
    secret: str
    """Key that signs the message, if the kind signs."""
    delivery: int
    """Number of the message, the same for each try."""
    address: str
    """Public URL of the server, for links; empty for messages without links."""
    now: float


class ChannelKind(ABC):
    """How the channels of one service are recognized and reached."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Name of the service, for pages."""
    target: ClassVar[str]
    """What the target of a channel is, in a phrase."""
    signs: ClassVar[bool] = False
    """Whether a channel has a secret, which signs its messages."""
    has_incidents: ClassVar[bool] = False
    """Whether the service keeps an incident per group of alerts, which a message about its end resolves."""

    @abstractmethod
    def recognizes(self, target: str) -> bool:
        """Return whether a target is one of this kind, for a channel that names no kind."""

    @abstractmethod
    def parse_target(self, target: str, settings: AlertSettings) -> str:
        """Return a target as it is stored. Raises InvalidSetting, WebhooksDisabled, MailDisabled."""

    @abstractmethod
    def shown(self, target: str) -> str:
        """Return the part of a stored target that is no secret."""

    @abstractmethod
    async def send(self, outgoing: OutgoingMessage, settings: AlertSettings, lookup: egress.Lookup) -> None:
        """Send a message.

        Raises:
            UrlBlocked: sending it again is of no use.
            DeliveryFailed: sending it again may succeed.
        """


class HttpChannel(ChannelKind):
    """A service that accepts POST requests."""

    hosts: ClassVar[tuple[str, ...]] = ()
    """Hosts of its URLs. Their subdomains belong to it as well."""

    @abstractmethod
    def body(self, outgoing: OutgoingMessage) -> bytes:
        """Return a message in the format of the service."""

    def headers(self, outgoing: OutgoingMessage, body: bytes) -> Mapping[str, str]:
        return {"Content-Type": "application/json", "User-Agent": "holdfast"}

    def url(self, outgoing: OutgoingMessage) -> str:
        """Return where a message is posted to."""
        return outgoing.target

    def recognizes(self, target: str) -> bool:
        try:
            host = urlsplit(target).hostname or ""
        except ValueError:
            return False
        return any(host == known or host.endswith(f".{known}") for known in self.hosts)

    def parse_target(self, target: str, settings: AlertSettings) -> str:
        if not settings.webhooks:
            raise WebhooksDisabled
        try:
            egress.parse(target, settings)
        except egress.UrlBlocked as error:
            raise InvalidSetting("target", str(error)) from None
        return target

    def shown(self, target: str) -> str:
        url = urlsplit(target)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}/…"

    async def send(self, outgoing: OutgoingMessage, settings: AlertSettings, lookup: egress.Lookup) -> None:
        if not settings.webhooks:
            raise egress.DeliveryFailed("webhooks are disabled on this server: HOLDFAST_WEBHOOKS is not on")
        body = self.body(outgoing)
        await egress.post(self.url(outgoing), body, self.headers(outgoing, body), settings, lookup=lookup)


class MissingKind(ChannelKind):
    """Stands for a kind of a stored channel that this server lacks: after a downgrade, or without its package."""

    def recognizes(self, target: str) -> bool:
        return False

    def parse_target(self, target: str, settings: AlertSettings) -> str:
        raise InvalidSetting("kind", "this server does not support this kind of channel")

    def shown(self, target: str) -> str:
        return "…"  # any part of it may be secret

    async def send(self, outgoing: OutgoingMessage, settings: AlertSettings, lookup: egress.Lookup) -> None:
        raise egress.UrlBlocked(
            "this server does not support this kind of channel: remove it, update the server, or install the "
            "package of the kind"
        )


_BUILT_IN: dict[str, ChannelKind] = {}


def register(kind: K) -> K:
    _BUILT_IN[kind.name] = kind()
    return kind


@functools.cache
def channel_kinds() -> Mapping[str, ChannelKind]:
    """Return all kinds by name: those of this package, in the order of their modules, and those of others."""
    kinds = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        if (kind := _load(entry, kinds)) is not None:
            kinds[kind.name] = kind
    return kinds


def _load(entry: EntryPoint, known: Mapping[str, ChannelKind]) -> ChannelKind | None:
    """Load a kind of another package; log the reason if that fails."""
    try:
        loaded = entry.load()
        if not (inspect.isclass(loaded) and issubclass(loaded, ChannelKind)):
            raise TypeError("not a subclass of ChannelKind")
        if loaded.name in known:
            raise ValueError(f"{type(known[loaded.name]).__module__} has a kind with the name {loaded.name!r}")
        if not all(isinstance(getattr(loaded, name, None), str) for name in ("title", "target")):
            raise TypeError("has no title or no target, which the pages show")
        kind: ChannelKind = loaded()
    except Exception:  # keep the server running: another package's code may raise anything
        logger.exception("alert channel %s (%s) cannot be loaded", entry.name, entry.value)
        return None
    return kind


def kind_of(name: str) -> ChannelKind:
    """Return the kind of a stored channel."""
    return channel_kinds().get(name) or MissingKind()


def kind_for(target: str) -> ChannelKind:
    """Return the kind that recognizes a target; a target of no known service is a webhook."""
    recognized = (kind for kind in channel_kinds().values() if kind.recognizes(target))
    return next(recognized, channel_kinds()["webhook"])
