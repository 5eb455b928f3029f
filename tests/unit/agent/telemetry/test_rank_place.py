"""Where a rank runs: its host, its device, and its job of the scheduler."""

from __future__ import annotations

import platform

import pytest

from holdfast import accelerators
from holdfast.telemetry import rank_place
from holdfast.telemetry.rank_place import SCHEDULERS, scheduler_job


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711"}, "Slurm job 4711"),
        ({"SLURM_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}, "Slurm job 4711, task 3"),
        ({"PBS_JOBID": "12.head"}, "PBS job 12.head"),
        ({"LSB_JOBID": "9"}, "LSF job 9"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0"}, "pod train-0"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "x", "POD_NAME": "train-1"}, "pod train-1"),
    ],
)
def test_the_job_of_the_scheduler_is_named(environment, words):
    assert scheduler_job(environment) == words


class Device:
    @staticmethod
    def current_device():
        return 3

    @staticmethod
    def get_device_name(number):
        return "NVIDIA H200"


class BrokenDevice(Device):
    @staticmethod
    def get_device_name(number):
        raise RuntimeError("the device is lost")


@pytest.mark.parametrize(("device", "name"), [(Device, "NVIDIA H200, cuda:3"), (BrokenDevice, "")])
def test_a_place_has_the_device_in_use_and_no_failure_of_it_matters(monkeypatch, device, name):
    for variable in (*SCHEDULERS, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(accelerators, "modules_in_use", lambda: {"cuda": device})
    place = rank_place.rank_place()
    assert (place.host, place.device, place.scheduler_job) == (platform.node(), name, "")
