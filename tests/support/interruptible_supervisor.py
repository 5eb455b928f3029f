"""`holdfast` as a process with pause points in the supervision of a job."""

from __future__ import annotations

from holdfast import cli
from holdfast.supervisor import supervisor_link
from holdfast.supervisor.supervisor import Supervisor
from tests.support.fault_injection import watch

watch(Supervisor, "_back_off", before="between end and start")
watch(
    supervisor_link.RestoreRequestWaiter,
    "_on_desired",
    after="heard while waiting",
    when=lambda _, desired: desired.restore is not None,
)

if __name__ == "__main__":
    cli.main()
