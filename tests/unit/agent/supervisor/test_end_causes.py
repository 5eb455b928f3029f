# ruff: noqa: E501  # messages as libraries print them
"""Causes of ends, from what libraries print."""

from __future__ import annotations

import signal
import textwrap

import pytest

from holdfast.supervisor.end_causes import (
    HOST_FAULT_SECONDS,
    HOST_MEMORY,
    RULES,
    EndCause,
    HostFaults,
    cause_in,
    end_cause,
)


def ended_with(exception: str, prefix: str = "") -> str:
    frames = 'Traceback (most recent call last):\n  File "train.py", line 40, in <module>\n    loss.backward()\n'
    return textwrap.indent(frames + exception, prefix, lambda _: True)


OUTPUTS = {
    "gpu_memory_fault": [
        ended_with(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
            "asynchronously reported at some other API call, so the stacktrace below might be incorrect."
        ),
        "NVRM: Xid (PCI:0000:97:00): 94, pid=1818987, name=python3, Contained: SM (0x1)",
    ],
    "gpu_lost": ["[74889.644] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus."],
    "gpu_link_fault": ["NVRM: Xid (PCI:0000:3b:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error"],
    "gpu_missing": [ended_with("RuntimeError: CUDA error: no CUDA-capable device is detected")],
    "syntax_error": [
        '  File "/work/train.py", line 3\n    def f(\n         ^\nSyntaxError: \'(\' was never closed',
        '  File "train.py", line 3\n    x = 1\nIndentationError: unexpected indent\n'
        + ended_with("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "),
        ended_with("SyntaxError: invalid syntax"),
    ],
    "import_error": [
        ended_with("ModuleNotFoundError: No module named 'flash_attn'"),
        ended_with("ImportError: cannot import name 'x' from 'y' (/site-packages/y.py)", "[rank3]: "),
    ],
    "device_memory": [
        ended_with("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ..."),
        ended_with("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB", "[rank1]: ")
        + "\n"
        + ended_with("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was "
                     "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed", "[rank0]: "),
    ],
    "device_assert": [ended_with("RuntimeError: CUDA error: device-side assert triggered")],
    "device_access": [
        ended_with("RuntimeError: CUDA error: an illegal memory access was encountered"),
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG 0 Rank 5] Process "
        "group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
    ],
    "device_launch": [ended_with("RuntimeError: CUDA error: unspecified launch failure")],
    "shared_memory": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        ended_with("RuntimeError: DataLoader worker (pid 3002) is killed by signal: Bus error. It is possible that "
                   "dataloader's workers are out of shared memory. Please try to raise your shared memory limit."),
        ended_with("RuntimeError: unable to write to file </torch_812_3491>: No space left on device (28)"),
    ],
    "disk_full": [ended_with("OSError: [Errno 28] No space left on device: 'samples.bin'")],
    "disk_quota": [ended_with("OSError: [Errno 122] Disk quota exceeded")],
    "host_memory": [
        ended_with("MemoryError"),
        ended_with("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 745. GiB for an array"),
        ended_with("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
                   "memory: you tried to allocate 40000000000 bytes. Error code 12 (Cannot allocate memory)"),
        ended_with("OSError: [Errno 12] Cannot allocate memory"),
    ],
    "open_files": [ended_with("OSError: [Errno 24] Too many open files: 'part-1.arrow'")],
    "port_in_use": [
        ended_with("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
                   "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
        ended_with("OSError: [Errno 98] Address already in use"),
    ],
    "collective_timeout": [
        "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran "
        "for 600020 milliseconds before timing out.",
    ],
    "rank_lost": [
        ended_with("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or "
                   "there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a "
                   "network error or a remote process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to "
                   "recv from 172.1.1.1<33759> failed : Connection reset by peer"),
        ended_with("RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
                   "[127.0.0.1]:33702: Connection reset by peer. This is typically caused by a remote worker hanging.",
                   "[rank0]: "),
        ended_with("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
                   "[10.0.0.2]:41234"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_finds_what_libraries_print(rule: EndCause) -> None:
    for output in OUTPUTS[rule.name]:
        assert cause_in(output.split("\n")) == rule.name, output


@pytest.mark.parametrize(
    "output",
    [
        "",
        "step 100 loss 2.31\nstep 101 loss 2.30",
        ended_with("ValueError: CUDA is not what this is about"),
        # errors that a script handled and logged, before another one ended it
        "CUDA out of memory. Tried to allocate 2.00 GiB: retrying with batch size 8\n" + ended_with("KeyError: 'x'"),
        ended_with("torch.OutOfMemoryError: CUDA out of memory.") + "\nretrying\nstep 1\nstep 2\nstep 3\n"
        + ended_with("KeyError: 'x'"),
        # a script that evaluates generated programs prints what came of them
        "candidate 3 failed:\n  File \"<string>\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"
        + ended_with("KeyError: 'x'"),
        "ModuleNotFoundError: No module named 'flash_attn': using the slow path\n" + ended_with("KeyError: 'x'"),
        "NVRM: Xid (PCI:0000:97:00): 43, pid=1818987, name=python3, Ch 00000001",
        "nccl: Watchdog caught collective operation timeout is what the documentation says\n",
    ],
)  # fmt: skip
def test_an_unknown_cause_stays_unknown(output: str) -> None:
    assert cause_in(output.split("\n")) == ""


def test_the_exit_decides_whether_the_output_counts() -> None:
    def found(
        name: str, status: int, *, hung: bool = False, killed: bool = False, finished: int = 0
    ) -> str | None:
        cause = end_cause(name, status, hung, killed, finished)
        return cause.name if cause is not None else None

    assert found("device_memory", 1) == "device_memory"
    assert found("collective_timeout", -signal.SIGABRT) == "collective_timeout"
    assert found("device_memory", 0) is None
    assert found("device_memory", -signal.SIGKILL) is None
    assert found("rank_lost", -signal.SIGKILL, hung=True) is None
    assert found("", 1) is None
    assert found("", -signal.SIGKILL, killed=True) == HOST_MEMORY.name
    assert found("rank_lost", 1, killed=True) == HOST_MEMORY.name
    # in the middle of training it is no error of the script as a whole
    assert found("import_error", 1) == "import_error"
    assert found("import_error", 1, finished=7) is None


def test_a_host_is_left_after_its_faults_within_a_day() -> None:
    fault, other = (end_cause(name, 1, False, False, 5) for name in ("gpu_lost", "device_memory"))
    faults = HostFaults(2)
    assert not faults.reach_limit(other, 0.0)
    assert not faults.reach_limit(fault, 0.0)
    assert not faults.reach_limit(None, 1.0)
    assert not faults.reach_limit(fault, HOST_FAULT_SECONDS + 1)
    assert faults.reach_limit(fault, HOST_FAULT_SECONDS + 2)
    assert not HostFaults(0).reach_limit(fault, 0.0)


def test_names_are_unique_and_texts_complete() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert set(OUTPUTS) == {rule.name for rule in RULES}
