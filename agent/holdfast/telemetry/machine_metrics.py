"""Use of the machine: GPU, CPU, memory, disk and network, measured on the thread that sends reports."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator

import psutil

from holdfast.accelerators import modules_in_use
from holdfast.protocol.wire import MachineSample
from holdfast.telemetry.reporter import TrainingPosition

logger = logging.getLogger("holdfast")

SAMPLE_SECONDS = 5.0
"""Least time between two samples."""
LOOPBACK = ("lo", "lo0")

Measured = Iterator[tuple[str, float]]
"""Names of fields of a sample, and values."""


class MachineMetrics:
    """Measures the machine of a rank. Create it on the training thread, and sample on one thread.

    What the system does not offer is left out of the samples: a container may hide the disks, and the figures of a
    GPU need `nvidia-ml-py`, or `amdsmi` on AMD.
    """

    def __init__(self, position: TrainingPosition, clock: Callable[[], float] = time.monotonic) -> None:
        self._position, self._clock = position, clock
        self._sources: list[Callable[[], Measured]] = [_cpu, _memory, self._process, self._disks, self._networks]
        # the current device is that of the calling thread
        for module in modules_in_use().values():
            self._device, self._module = module.current_device(), module
            self._sources.append(self._gpu)
        self._own = psutil.Process()
        self._totals: dict[tuple[str, ...], float] = {}
        """Counters at the last sample: bytes or seconds since the start of the machine or process."""
        self._sampled_at = -math.inf
        self._elapsed_seconds = math.inf
        self._here = (0, 0)

    def sample(self) -> MachineSample | None:
        """Return a sample; `None` if the last one is recent, or no iteration has ended since. Never raises."""
        now, here = self._clock(), (self._position.lineage, self._position.iteration)
        if now - self._sampled_at < SAMPLE_SECONDS or here == self._here:
            return None
        is_first = self._sampled_at == -math.inf
        self._elapsed_seconds, self._sampled_at, self._here = now - self._sampled_at, now, here
        values: dict[str, float] = {}
        for source in list(self._sources):
            try:
                values.update((name, value) for name, value in source() if math.isfinite(value))
            except Exception:  # whatever a driver or a container refuses must not stop the reports
                self._sources.remove(source)
                logger.debug("the machine is measured without %s", source.__name__, exc_info=True)
        if is_first:  # rates need two readings
            return None
        return MachineSample(at=time.time(), lineage=here[0], iteration=here[1], **values)

    def _per_second(self, total: float, *key: str) -> float:
        """Return the growth of a counter per second since the last sample; NaN for a new counter."""
        before, self._totals[key] = self._totals.get(key, math.nan), total
        return max(0.0, total - before) / self._elapsed_seconds if total >= before else math.nan

    def _process(self) -> Measured:
        times = self._own.cpu_times()
        yield "process_cpu_cores", self._per_second(times.user + times.system, "process")
        yield "process_memory_bytes", float(self._own.memory_info().rss)

    def _disks(self) -> Measured:
        read = written = busy_ms = math.nan
        for name, disk in psutil.disk_io_counters(perdisk=True, nowrap=False).items():
            read = _larger(read, self._per_second(disk.read_bytes, "read", name))
            written = _larger(written, self._per_second(disk.write_bytes, "written", name))
            busy_ms = _larger(busy_ms, self._per_second(getattr(disk, "busy_time", math.nan), "busy", name))
        yield "disk_read_bytes_per_second", read
        yield "disk_write_bytes_per_second", written
        yield "disk_busy_share", min(1.0, busy_ms / 1000)

    def _networks(self) -> Measured:
        received = sent = math.nan
        for name, network in psutil.net_io_counters(pernic=True, nowrap=False).items():
            if name not in LOOPBACK:
                received = _larger(received, self._per_second(network.bytes_recv, "received", name))
                sent = _larger(sent, self._per_second(network.bytes_sent, "sent", name))
        yield "network_received_bytes_per_second", received
        yield "network_sent_bytes_per_second", sent

    def _gpu(self) -> Measured:
        yield "gpu_share", self._module.utilization(self._device) / 100
        yield "gpu_memory_bytes", float(self._module.device_memory_used(self._device))


def _cpu() -> Measured:
    yield "cpu_share", psutil.cpu_percent() / 100  # since its last call in this thread


def _memory() -> Measured:
    memory = psutil.virtual_memory()
    yield "memory_bytes", float(memory.total - memory.available)


def _larger(one: float, other: float) -> float:
    """Return the larger number, or the only one that is not NaN."""
    return one if one >= other or math.isnan(other) else other
