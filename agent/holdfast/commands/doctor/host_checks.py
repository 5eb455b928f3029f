"""Checks of each host of a job: fork, memory and versions."""

from __future__ import annotations

import errno
import os
import platform
import time
import warnings
from importlib.metadata import version

import torch

from holdfast.commands.doctor.findings import Finding, Hosts
from holdfast.system.host_memory import available_bytes, can_share
from holdfast.units import format_bytes

FORK_SECONDS = 20.0
"""A child that takes longer hangs: it takes milliseconds."""


def fork() -> Finding:
    """Fork this process, with torch imported, and multiply matrices in the child, as a loader's worker would."""
    matrix = torch.ones(256, 256, device="cpu")
    matrix @ matrix  # so that the libraries of torch have their threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads is the point
            child = os.fork()
    except OSError as error:
        remedy = {
            errno.ENOMEM: "give the host swap, or set vm.overcommit_memory to 0 or 1",
            errno.EAGAIN: "raise the limit of processes (ulimit -u, or pids.max of the container)",
        }.get(error.errno or 0)
        return Finding(check="fork", state="problem", measured=f"fork failed: {error.strerror}", remedy=remedy)
    if child == 0:
        torch.set_num_threads(1)  # as a loader's worker does: threads of OpenMP do not survive a fork
        is_right = bool((matrix @ matrix == 256).all())
        os._exit(0 if is_right else 1)
    status = _wait_for(child)
    if status == 0:
        return Finding(check="fork", measured="works")
    ended = "hangs" if status is None else f"ended with status {status}"
    return Finding(
        check="fork",
        state="warning",
        measured=f"a matrix product in a forked child {ended}",
        remedy="use multiprocessing_context='spawn' for loader workers, or another build of OpenMP",
    )


def _wait_for(child: int) -> int | None:
    """Return the exit status of a child; kill one that hangs, and return `None`."""
    deadline = time.monotonic() + FORK_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def memory(hosts: Hosts, state_bytes: float | None) -> Finding | None:
    """Compare the memory of this host with what the snapshots of its ranks take."""
    if not hosts.leads_host:
        return None
    available, here = available_bytes(), len(hosts.ranks_on(hosts.name))
    measured = f"{format_bytes(available)} available for {here} {'rank' if here == 1 else 'ranks'}"
    if state_bytes is None:
        return Finding(check="memory", measured=measured)
    needed = round(state_bytes * here / hosts.ranks.world_size)
    measured += f", a snapshot takes {format_bytes(needed)}"
    if needed <= available:
        return Finding(check="memory", measured=measured)
    return Finding(
        check="memory",
        state="problem",
        measured=measured,
        remedy="use hosts or containers with more memory, fewer ranks on each, or more hosts",
    )


def shared_memory(hosts: Hosts) -> Finding | None:
    """Try the memory files in which `holdfast run` keeps snapshots."""
    if not hosts.leads_host:
        return None
    if can_share():
        return Finding(check="memory tier", measured="memory files (memfd) work")
    return Finding(
        check="memory tier",
        state="warning",
        measured="memory files (memfd) are not available",
        remedy="allow memfd_create in the container's seccomp profile; otherwise snapshots of a killed trainer "
        "are lost",
    )


def versions(hosts: Hosts) -> Finding | None:
    """Compare the versions on all ranks."""
    own = f"Holdfast {version('holdfast')}, torch {torch.__version__}, Python {platform.python_version()}"
    every = [each.decode() for each in hosts.ranks.gather(own.encode())]
    if own == every[0]:
        return Finding(check="versions", measured=own) if hosts.ranks.leads else None
    return Finding(
        check="versions",
        state="problem",
        measured=f"{own}; rank 0 has {every[0]}",
        remedy="install the same versions on all hosts",
    )
