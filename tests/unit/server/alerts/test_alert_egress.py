"""Webhooks reach what is public and nothing else, whatever is written in their URLs."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl

import pytest

from holdfast_server.alerts import egress
from holdfast_server.core.alert_settings import AlertSettings

ON = AlertSettings(webhooks=True)
FORMS = [
    # this machine
    "https://127.0.0.1/", "https://127.1/", "https://127.0.1/", "https://2130706433/", "https://0x7f000001/",
    "https://0x7f.0.0.1/", "https://0177.0.0.1/", "https://017700000001/", "https://127.000.000.001/",
    "https://0/", "https://0.0.0.0/", "https://localhost/", "https://LOCALHOST/", "https://localhost./",
    "https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:0:0:1]/", "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/", "https://[::127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/",
    "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "https://127.0.0.1.:443/", "https://①②⑦.⓪.⓪.①/",
    "https://127。0。0。1/", "https://%31%32%37.0.0.1/",
    # private networks, links, clouds' metadata, multicast
    "https://10.0.0.1/",
    "https://172.16.0.1/", "https://172.31.255.255/", "https://192.168.0.1/",
    "https://192.168.1/", "https://100.64.0.1/", "https://100.100.100.200/", "https://169.254.169.254/",
    "https://0xa9fea9fe/", "https://2852039166/", "https://[::ffff:169.254.169.254]/", "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/", "https://[fc00::1]/", "https://[fd00:ec2::254]/", "https://[fec0::1]/",
    "https://168.63.129.16/", "https://192.0.0.192/", "https://192.0.2.1/", "https://198.18.0.1/",
    "https://224.0.0.1/", "https://[ff02::1]/", "https://240.0.0.1/", "https://255.255.255.255/",
    # other protocols, other doors
    "http://hooks.example.org/", "ftp://hooks.example.org/", "file:///etc/passwd", "gopher://127.0.0.1:70/_",
    "https://hooks.example.org:8443/", "https://hooks.example.org:22/", "//hooks.example.org/",
    "hooks.example.org",
    # two hosts in one
    "https://hooks.example.org@127.0.0.1/", "https://user:secret@hooks.example.org/", "https://a@b@c.example.org/",
    "https://127.0.0.1\\@hooks.example.org/", "https://hooks.example.org\\.127.0.0.1/",
    "https://hooks.example.org\r\nHost: 127.0.0.1/", "https://hooks.example.org/\r\nX-Evil: 1",
    "https://hooks.example.org\t/", "https://hooks.example.org /", "https:///path", "https://", "https://[", "",
    "https://metadata/", "https://kubernetes/", "https://hooks..example.org/", "https://-a.example.org/",
    "https://hooks.example.org:99999/", "https://" + "a" * 300 + ".example.org/",
    "https://a.example.org/" + "x" * 3000,
]  # fmt: skip


async def never(host: str, port: int) -> list[str]:
    raise AssertionError(f"{host} was looked up")


@pytest.mark.parametrize("url", FORMS)
def test_a_form_that_may_lead_into_our_own_network_is_refused_before_anything_is_looked_up(url):
    assert len(set(FORMS)) >= 60
    with pytest.raises(egress.UrlBlocked):
        asyncio.run(egress.post(url, b"{}", {}, ON, lookup=never))


SPECIAL = [
    # IANA's special-purpose address registries, the globally reachable ones too, and multicast
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32",
    "::1/128", "::/128", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64",
    "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32",
    "2001:4:112::/48", "2001:10::/28", "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2002::/16",
    "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip


@pytest.mark.parametrize("network", SPECIAL)
def test_no_address_with_a_special_purpose_is_public(network):
    network = ipaddress.ip_network(network)
    for address in (network[0], network[network.num_addresses // 2], network[-1]):
        assert not egress.is_public(address), address


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "192.88.98.1", "2606:2800:21f::1", "2a00::1"])
def test_other_addresses_are_public(address):
    assert egress.is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "answer",
    [
        ["127.0.0.1"], ["10.1.2.3"], ["169.254.169.254"], ["::1"], ["::ffff:10.0.0.1"], ["fd00::1"],
        ["93.184.215.14", "127.0.0.1"], ["2606:2800:21f::1", "::1"], ["fe80::1%eth0"],
    ],
)  # fmt: skip
def test_a_public_name_that_leads_to_a_private_address_is_refused(answer):
    async def lookup(host: str, port: int) -> list[str]:
        return answer

    with pytest.raises(egress.UrlBlocked, match="not public"):
        asyncio.run(egress.post("https://hooks.example.org/", b"{}", {}, ON, lookup=lookup))


def test_a_name_is_looked_up_once_and_that_very_address_connected_to(monkeypatch):
    """A name that changes its answer between the look and the connection gets nowhere."""
    asked, connected = [], []

    async def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["93.184.215.14"] if len(asked) == 1 else ["127.0.0.1"]

    async def connect(address, port, **more):
        connected.append((address, port, more["server_hostname"], more["ssl"]))
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(egress.DeliveryFailed):
        asyncio.run(egress.post("https://hooks.example.org/x", b"{}", {}, ON, lookup=lookup))
    ((address, port, name, context),) = connected
    assert (asked, address, port, name) == (["hooks.example.org"], "93.184.215.14", 443, "hooks.example.org")
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_addresses_are_public(address):
    assert egress.is_public(ipaddress.ip_address(address))


# ---- with a real server at the other end ----------------------------------------------------------


class RecordingListener:
    """Answers every connection with the same bytes, and keeps what it was sent."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer, self.got = answer, []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.got.append((head, await reader.readexactly(length)))
        if self.answer is not None:
            writer.write(self.answer)
        writer.close()


def send(answer: bytes | None, path: str = "/hook", *, allow: bool = True) -> RecordingListener:
    async def run() -> RecordingListener:
        hook = RecordingListener(answer)
        server = await asyncio.start_server(hook, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        hosts = frozenset([f"http://127.0.0.1:{port}"] if allow else [])
        settings = AlertSettings(webhooks=True, webhook_hosts=hosts)
        async with server:
            await egress.post(f"http://127.0.0.1:{port}{path}", b'{"a": 1}', {"X-Test": "1"}, settings)
        return hook

    return asyncio.run(run())


def test_a_host_that_the_operator_allows_is_reached():
    ((head, body),) = send(b"HTTP/1.1 204 No Content\r\n\r\n", "/hook?x=1").got
    assert head.startswith(b"POST /hook?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert (b"X-Test: 1\r\n" in head, body) == (True, b'{"a": 1}')
    with pytest.raises(egress.UrlBlocked):
        send(b"HTTP/1.1 204 No Content\r\n\r\n", allow=False)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n",
        b"HTTP/1.1 500 the secret of the house\r\n\r\nthe secret of the house",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200",
        b"x" * 200_000,
        b"",
        None,
    ],
)
def test_whatever_else_is_answered_is_not_taken_and_told_to_nobody(answer):
    if answer == b"HTTP/1.1 200":
        answer = b"HTTP/9.9 200 OK\r\n\r\n"
    with pytest.raises(egress.DeliveryFailed) as refused:
        send(answer)
    assert "secret" not in str(refused.value)
    assert "SSH" not in str(refused.value)


def test_one_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(egress, "TIMEOUT_SECONDS", 0.05)

    async def run() -> None:
        held = asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await held.wait()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = AlertSettings(webhooks=True, webhook_hosts=frozenset([f"http://127.0.0.1:{port}"]))
        async with server:
            try:
                await egress.post(f"http://127.0.0.1:{port}/", b"{}", {}, settings)
            finally:
                held.set()

    with pytest.raises(egress.DeliveryFailed, match="did not answer"):
        asyncio.run(run())


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(egress.UrlBlocked, match="65536"):
        asyncio.run(egress.post("https://hooks.example.org/", b"x" * 65537, {}, ON, lookup=never))
