"""Samples of the machine: how often, what of them a machine offers, and their rates."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from holdfast.protocol.wire import MachineSample
from holdfast.telemetry.machine_metrics import SAMPLE_SECONDS, MachineMetrics
from holdfast.telemetry.reporter import TrainingPosition


class Machine:
    """A machine under test, whose clock and training position move by hand."""

    def __init__(self):
        self.now, self.position = 100.0, TrainingPosition()
        self.metrics = MachineMetrics(self.position, lambda: self.now)

    def later(self, seconds=SAMPLE_SECONDS, *, iterations=1):
        self.now += seconds
        self.position.iteration += iterations
        return self.metrics.sample()


@pytest.fixture
def counters(monkeypatch):
    """Bytes that each disk and network has moved, and the milliseconds that each disk was busy."""
    found = SimpleNamespace(bytes=0, busy_ms=0)

    def disks(**_):
        one = SimpleNamespace(read_bytes=found.bytes, write_bytes=3 * found.bytes, busy_time=found.busy_ms)
        return {"sda": one, "sda1": SimpleNamespace(read_bytes=found.bytes, write_bytes=0, busy_time=0)}

    def networks(**_):
        def moved(factor):
            return SimpleNamespace(bytes_recv=factor * found.bytes, bytes_sent=2 * factor * found.bytes)

        return {"lo": moved(100), "eth0": moved(1), "eth1": moved(0.5)}

    monkeypatch.setattr(psutil, "disk_io_counters", disks)
    monkeypatch.setattr(psutil, "net_io_counters", networks)
    return found


def test_the_second_sample_has_the_use_of_cpu_and_memory():
    machine = Machine()
    assert machine.later() is None
    found = machine.later()
    assert (found.iteration, found.lineage) == (2, 1)
    assert 0 <= found.cpu_share <= 1
    assert found.process_cpu_cores >= 0
    assert found.memory_bytes > 0
    assert found.process_memory_bytes > 10**6


def test_samples_keep_their_interval_and_follow_an_iteration():
    machine = Machine()
    machine.later()
    assert machine.later(SAMPLE_SECONDS / 2) is None
    assert machine.later(SAMPLE_SECONDS / 2) is not None
    assert machine.later(iterations=0) is None
    assert machine.later(0.1) is not None


def test_rates_are_those_of_the_busiest_disk_and_network_without_the_loopback(counters):
    machine = Machine()
    machine.later()
    counters.bytes, counters.busy_ms = 5000, 2500
    found = machine.later(5.0)
    assert (found.disk_read_bytes_per_second, found.disk_write_bytes_per_second) == (1000, 3000)
    assert found.disk_busy_share == 0.5
    assert (found.network_received_bytes_per_second, found.network_sent_bytes_per_second) == (1000, 2000)


def test_a_counter_that_starts_anew_is_not_measured_once(counters):
    machine = Machine()
    counters.bytes = 5000
    machine.later()
    counters.bytes = 10
    assert machine.later().network_sent_bytes_per_second is None
    counters.bytes = 110
    assert machine.later(10.0).network_sent_bytes_per_second == 20


def test_what_the_system_refuses_is_left_out_and_not_asked_for_again(monkeypatch):
    asked = []

    def refuse(**_):
        asked.append(1)
        raise PermissionError("/proc/diskstats")

    monkeypatch.setattr(psutil, "disk_io_counters", refuse)
    machine = Machine()
    machine.later()
    found = machine.later()
    assert (found.disk_read_bytes_per_second, found.memory_bytes > 0, len(asked)) == (None, True, 1)


def test_a_system_without_disks_has_no_figures_of_them(monkeypatch):
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: None)
    machine = Machine()
    machine.later()
    assert machine.later().disk_busy_share is None


def test_a_sample_takes_few_bytes(counters):
    machine = Machine()
    machine.later()
    assert len(msgspec.msgpack.encode(machine.later())) < 400
    assert len(msgspec.msgpack.encode(MachineSample(at=1.0, lineage=1, iteration=1))) < 60


def test_a_gpu_is_measured_by_the_device_of_the_training_thread(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 87)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: asked.append(device) or 61 * 10**9)
    machine = Machine()
    machine.later()
    found = machine.later()
    assert (found.gpu_share, found.gpu_memory_bytes, set(asked)) == (0.87, 61e9, {3})


def test_a_gpu_without_the_library_of_its_vendor_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = Machine()
    machine.later()
    found = machine.later()
    assert (found.gpu_share, found.memory_bytes > 0) == (None, True)
