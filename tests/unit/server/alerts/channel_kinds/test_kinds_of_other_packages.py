from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from holdfast_server.alerts.channel_kinds import kind
from holdfast_server.alerts.channel_kinds.kind import ChannelKind, HttpChannel, channel_kinds, kind_for, kind_of


class AcmeChat(HttpChannel):
    name = "acme"
    title = "Acme chat"
    target = "the URL of a room"
    hosts = ("chat.acme.example",)

    def body(self, outgoing):
        return b"{}"


class OtherAcme(AcmeChat):
    pass


class OwnSlack(AcmeChat):
    name = "slack"


class Incomplete(ChannelKind):
    name, title, target = "incomplete", "Incomplete", "a target"


class Untitled(HttpChannel):
    name = "untitled"

    def body(self, outgoing):
        return b""


@pytest.fixture
def install(monkeypatch):
    def with_entry_points(*names):
        entries = [EntryPoint(name.lower(), f"{__name__}:{name}", kind.GROUP) for name in names]
        monkeypatch.setattr(kind, "entry_points", lambda group: entries if group == kind.GROUP else [])
        channel_kinds.cache_clear()

    yield with_entry_points
    channel_kinds.cache_clear()


def test_a_kind_of_another_package_is_found_by_its_name_and_by_its_hosts(install):
    install("AcmeChat")
    assert isinstance(kind_of("acme"), AcmeChat)
    assert kind_for("https://chat.acme.example/rooms/1").name == "acme"
    assert "slack" in channel_kinds()


@pytest.mark.parametrize("name", ["OwnSlack", "Incomplete", "Untitled", "Missing", "pytest"])
def test_a_kind_that_cannot_be_loaded_is_logged_and_leaves_the_others(install, caplog, name):
    install(name, "AcmeChat")
    assert {"acme", "slack", "webhook"} <= set(channel_kinds())
    assert not isinstance(kind_of("slack"), AcmeChat)
    assert f"alert channel {name.lower()} " in caplog.text


def test_of_two_packages_with_one_name_the_first_is_kept_and_the_other_logged(install, caplog):
    install("AcmeChat", "OtherAcme")
    assert type(kind_of("acme")) is AcmeChat
    assert f"{__name__} has a kind with the name 'acme'" in caplog.text
