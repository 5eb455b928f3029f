"""The checks of `holdfast doctor` in their order."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.commands.doctor import connection_checks, host_checks
from holdfast.commands.doctor.findings import Finding, Hosts, run_check
from holdfast.commands.doctor.store_checks import StoreProbe
from holdfast.distributed.ranks import Ranks


def examine(
    hosts: Hosts,
    *,
    store: str,
    disk: str,
    size_bytes: int,
    state_bytes: float | None,
    server: str | None,
    token: str | None,
) -> list[Finding]:
    """Run all checks on all ranks, and return the findings of all. RanksLost: a rank has ended."""
    checks: list[tuple[str, Callable[[], Finding | None]]] = [
        ("versions", lambda: host_checks.versions(hosts)),
        ("fork", host_checks.fork),
        ("memory", lambda: host_checks.memory(hosts, state_bytes)),
        ("memory tier", lambda: host_checks.shared_memory(hosts)),
        ("hosts", lambda: connection_checks.pairing(hosts)),
        ("clock", lambda: connection_checks.clocks(hosts)),
        ("server", lambda: connection_checks.server(hosts, server, token)),
        ("server clock", lambda: connection_checks.server_clock(hosts, server)),
    ]
    findings = [finding for name, check in checks for finding in run_check(hosts, name, check)]
    findings += _examine_store(hosts, StoreProbe(hosts, store, size_bytes))
    return findings + _examine_disk(hosts, disk, size_bytes)


def _examine_store(hosts: Hosts, probe: StoreProbe) -> list[Finding]:
    try:
        findings = run_check(hosts, "store write", probe.open)
        if findings:  # the others would fail for the same reason
            return findings
        findings = run_check(hosts, "store write", probe.write)
        if any(finding.state == "problem" for finding in findings):
            return findings
        for name, check in (
            ("store read", probe.read),
            ("store links", probe.links),
            ("store locks", probe.locks),
            ("store fencing", probe.fencing),
        ):
            findings += run_check(hosts, name, check)
        return findings
    finally:
        probe.remove()


def _examine_disk(hosts: Hosts, disk: str, size_bytes: int) -> list[Finding]:
    """Measure the local disk of each host, by its first rank."""
    alone = Hosts(Ranks(), (hosts.name,))
    probe = StoreProbe(alone, disk, size_bytes, "local disk")

    def write() -> Finding | None:
        if not hosts.leads_host:
            return None
        probe.open()
        return probe.write()

    try:
        findings = run_check(hosts, "local disk write", write)
        if any(finding.state == "problem" for finding in findings):
            return findings
        return findings + run_check(hosts, "local disk read", lambda: probe.read() if hosts.leads_host else None)
    finally:
        probe.remove()
