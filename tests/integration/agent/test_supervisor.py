"""The supervisor with real processes: small trainers that crash, hang, fork and finish on demand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.supervisor.hang_detector import HangDetector, RestartProgress
from holdfast.supervisor.restart_limits import RestartLimits
from holdfast.system import supervisor_channel, supervisor_files
from holdfast.system.processes import describe_exit, shell_status
from tests.support.eventually import eventually
from tests.support.foreign_servers import other_server

pytestmark = pytest.mark.processes

TRAINER = """
import os, pathlib, signal, struct, subprocess, sys, time

folder = pathlib.Path(sys.argv[1])
start = len(list(folder.glob("start-*"))) + 1
text = f"{os.getpid()} {os.environ.get('HOLDFAST_PREVIOUS_EXIT')}"
(folder / f"start-{start}").write_text(text)


def progress(iteration, steps):
    with open(os.environ["HOLDFAST_PROGRESS"], "r+b") as file:
        file.write(struct.pack("<qq", iteration, steps))


def note(name):
    (folder / name).touch()


def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)


def die():
    os.kill(os.getpid(), signal.SIGKILL)

"""

UNKNOWN_JOB = b'HTTP/1.1 404 Not Found\r\nContent-Length: 25\r\n\r\n{"error": "unknown_job"} \n'
QUICK = {"first_backoff_seconds": 0.01, "longest_backoff_seconds": 0.05, "poll_seconds": 0.02}


@dataclass
class SupervisorResult:
    status: int
    lines: list[str]


@dataclass
class SupervisedTrainer:
    """A folder with a trainer in it, and the supervisor of that trainer as a process of its own."""

    folder: Path
    running: subprocess.Popen[str] | None = None

    def start(self, body: str, *, setup: str = "", **limits: float) -> subprocess.Popen[str]:
        trainer = self.folder / "trainer.py"
        trainer.write_text(TRAINER + textwrap.dedent(body))
        program = (
            "import signal, sys\n"
            f"{setup}\n"
            "from holdfast.supervisor.restart_limits import RestartLimits\n"
            "from holdfast.supervisor.supervisor import Supervisor\n"
            f"limits = RestartLimits(**{QUICK | limits!r})\n"
            f"command = [sys.executable, {str(trainer)!r}, {str(self.folder)!r}]\n"
            "sys.exit(Supervisor(command, limits=limits).run())\n"
        )
        self.running = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        return self.running

    def run(self, body: str, **limits: float) -> SupervisorResult:
        self.start(body, **limits)
        return self.end()

    def end(self) -> SupervisorResult:
        assert self.running is not None
        _, errors = self.running.communicate()
        return SupervisorResult(self.running.returncode, errors.splitlines())

    def started(self, number: int) -> tuple[int, str]:
        pid, previous_exit = (self.folder / f"start-{number}").read_text().split(" ", 1)
        return int(pid), previous_exit

    @property
    def starts(self) -> int:
        return len(list(self.folder.glob("start-*")))

    def wait_for(self, name: str) -> None:
        eventually((self.folder / name).exists)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisedTrainer]:
    stage = SupervisedTrainer(tmp_path)
    yield stage
    if stage.running and stage.running.poll() is None:
        stage.running.kill()
        stage.running.communicate()


def test_a_trainer_that_finishes_is_started_once(stage: SupervisedTrainer) -> None:
    ended = stage.run("progress(7, 7)")
    assert (ended.status, stage.starts) == (0, 1)
    assert ended.lines[-1].endswith("exit status 0 at iteration 7")


def test_a_killed_trainer_is_started_again_and_told_how_it_ended(stage: SupervisedTrainer) -> None:
    ended = stage.run("progress(start, 1)\nif start < 3: die()")
    assert (ended.status, stage.starts) == (0, 3)
    assert stage.started(1)[1] == "None"
    assert stage.started(2)[1] == "killed by SIGKILL"


def test_an_exit_status_is_told_as_well(stage: SupervisedTrainer) -> None:
    assert stage.run("if start == 1: sys.exit(41)").status == 0
    assert stage.started(2)[1] == "exit status 41"


def test_starts_that_get_nowhere_end_with_the_trainers_own_status(stage: SupervisedTrainer) -> None:
    ended = stage.run("sys.exit(9)", fruitless_starts=3)
    assert (ended.status, stage.starts) == (9, 3)
    assert "giving up: 3 starts in a row ended without a new iteration" in ended.lines[-1]


@pytest.mark.parametrize("status", [2, 126, 127])
def test_a_command_that_cannot_start_is_started_once(stage: SupervisedTrainer, status: int) -> None:
    """2 is what Python ends with for a script that is not there."""
    ended = stage.run(f"sys.exit({status})")
    assert (ended.status, stage.starts) == (status, 1)
    assert f"giving up: the command cannot start (exit status {status}, before a" in ended.lines[-1]


@pytest.mark.parametrize(
    ("body", "cause"),
    [("import holdfst", "an import failed"), ("x = (", "the script cannot be compiled")],
)
def test_an_error_that_no_start_can_pass_is_tried_once(stage: SupervisedTrainer, body: str, cause: str) -> None:
    ended = stage.run(body)
    assert ended.status == 1
    assert len([line for line in ended.lines if "holdfast run: start " in line]) == 1
    assert f"giving up: 1 start ended without a new iteration, the last one ({cause}: " in ended.lines[-1]


def test_an_import_error_of_a_trainer_that_has_trained_is_tried_again(stage: SupervisedTrainer) -> None:
    body = "progress(start, start) if start == 1 else note('again')\nimport holdfst"
    ended = stage.run(body, fruitless_starts=3)
    assert len([line for line in ended.lines if "holdfast run: start " in line]) == 4


def test_the_cause_of_an_end_is_logged(stage: SupervisedTrainer) -> None:
    body = (
        "raise RuntimeError('CUDA error: an illegal memory access was encountered') if start == 1 else SystemExit"
    )
    ended = stage.run(body)
    assert "the trainer ended (the GPU accessed memory that is not allocated: exit status 1)" in "".join(
        ended.lines
    )


def test_a_host_is_left_after_faults_of_its_hardware(stage: SupervisedTrainer) -> None:
    body = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
    ended = stage.run(body, host_faults=2)
    assert ended.status == supervisor_channel.EXIT_HOST_FAULT
    assert "2 times on this host: leaving it" in ended.lines[-1]


def test_a_status_of_a_trainer_that_has_trained_is_no_failed_start(stage: SupervisedTrainer) -> None:
    assert stage.run(TRAINS + "if start < 3: sys.exit(2)").status == 0
    assert stage.starts == 3


def test_where_no_session_began_no_checkpoint_is_promised(stage: SupervisedTrainer) -> None:
    ended = stage.run("sys.exit(9)", fruitless_starts=2)
    assert "before a session began" in ended.lines[-1]
    assert "checkpoint" not in ended.lines[-1]


def test_each_line_has_a_time_and_a_level(stage: SupervisedTrainer) -> None:
    ended = stage.run("die()", fruitless_starts=2)
    levels = [
        re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ([A-Z]+) holdfast run: .*", line) for line in ended.lines
    ]
    assert [each and each[1] for each in levels] == ["INFO", "WARNING", "INFO", "ERROR"]


def test_the_page_of_the_job_is_named_and_whether_the_server_answers(stage: SupervisedTrainer) -> None:
    with other_server(UNKNOWN_JOB) as address:
        body = TRAINS.replace("server=None", f"server={address!r}") + "wait_for('continue')"
        supervisor = stage.start(body)
        assert supervisor.stderr is not None
        page = next(line for line in supervisor.stderr if "dashboard" in line)
    assert page.endswith(f"INFO holdfast run: dashboard: {address}/jobs/job (the server answers)\n")
    (stage.folder / "continue").touch()
    assert stage.end().status == 0


def test_a_server_that_does_not_answer_is_named_and_changes_nothing(stage: SupervisedTrainer) -> None:
    body = TRAINS.replace("server=None", "server='http://127.0.0.1:1'") + "wait_for('continue')"
    supervisor = stage.start(body)
    assert supervisor.stderr is not None
    page = next(line for line in supervisor.stderr if "dashboard" in line)
    assert "WARNING holdfast run: dashboard: http://127.0.0.1:1/jobs/job: no server answers" in page
    (stage.folder / "continue").touch()
    assert stage.end().status == 0


def test_a_signal_that_always_comes_back_is_reported_as_a_shell_would(stage: SupervisedTrainer) -> None:
    assert stage.run("die()", fruitless_starts=2).status == 128 + signal.SIGKILL


def test_a_crash_at_the_same_iteration_every_time_is_a_crash_loop(stage: SupervisedTrainer) -> None:
    ended = stage.run("progress(400, 10)\ndie()", fruitless_starts=3)
    assert stage.starts == 1 + 3  # the first start did finish new iterations
    assert "at iteration 400" in ended.lines[-1]


def test_a_crash_loop_whose_checkpoints_come_closer_to_the_crash_is_one(stage: SupervisedTrainer) -> None:
    ended = stage.run("progress(100, 100 if start == 1 else 6 - start)\ndie()", fruitless_starts=3)
    assert stage.starts == 1 + 3
    assert "giving up: 3 starts in a row ended without a new iteration" in ended.lines[-1]


def test_one_start_is_told_as_one(stage: SupervisedTrainer) -> None:
    assert "giving up: 1 start ended without a new iteration" in stage.run("die()", fruitless_starts=1).lines[-1]


def test_progress_starts_the_count_again(stage: SupervisedTrainer) -> None:
    ended = stage.run("progress(start // 2, 1)\nif start < 9: die()", fruitless_starts=2)
    assert (ended.status, stage.starts) == (0, 9)


def test_sigterm_reaches_the_trainer_which_ends_in_its_own_way(stage: SupervisedTrainer) -> None:
    supervisor = stage.start(
        """
        def leave(*_):
            note("asked")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        note("ready")
        while True: time.sleep(0.05)
        """
    )
    stage.wait_for("ready")
    supervisor.terminate()
    assert stage.end().status == 0
    assert stage.starts == 1
    assert (stage.folder / "asked").exists()


def test_a_trainer_that_dies_of_the_signal_passed_on_is_not_started_again(stage: SupervisedTrainer) -> None:
    supervisor = stage.start("note('ready')\nwhile True: time.sleep(0.05)")
    stage.wait_for("ready")
    supervisor.send_signal(signal.SIGTERM)
    assert stage.end().status == 128 + signal.SIGTERM
    assert stage.starts == 1


@pytest.mark.parametrize(("own", "expected"), [(1, 128 + signal.SIGTERM), (7, 7)])
def test_a_trainer_in_which_the_signal_raised_is_reported_as_ended_by_it(
    stage: SupervisedTrainer, own: int, expected: int
) -> None:
    supervisor = stage.start(
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({own}))\nnote('ready')\nwhile True: time.sleep(0.05)"
    )
    stage.wait_for("ready")
    supervisor.terminate()
    assert stage.end().status == expected


def test_a_hangup_that_nohup_ignores_is_not_taken_for_an_order(stage: SupervisedTrainer) -> None:
    body = "note('ready')\nwait_for('go')"
    supervisor = stage.start(body, setup="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    stage.wait_for("ready")
    supervisor.send_signal(signal.SIGHUP)
    (stage.folder / "go").touch()
    assert stage.end().status == 0


def test_a_message_for_the_trainer_reaches_it_and_ends_nothing(stage: SupervisedTrainer) -> None:
    supervisor = stage.start(
        "signal.signal(signal.SIGUSR1, lambda *_: note('continue'))\nnote('ready')\nwait_for('continue')"
    )
    stage.wait_for("ready")
    supervisor.send_signal(signal.SIGUSR1)
    assert stage.end().status == 0
    assert stage.starts == 1


@pytest.mark.parametrize(
    "harm", ["os.unlink(os.environ['HOLDFAST_PROGRESS'])", "os.truncate(os.environ['HOLDFAST_PROGRESS'], 3)"]
)
def test_a_progress_file_that_somebody_removed_harms_nobody(stage: SupervisedTrainer, harm: str) -> None:
    ended = stage.run(f"{harm}\nnote('ready')\ntime.sleep(0.2)\nif start == 1: die()")
    assert ended.status == 0
    assert stage.starts == 2


def test_a_real_time_signal_is_a_crash_like_any_other(stage: SupervisedTrainer) -> None:
    ended = stage.run("if start == 1: os.kill(os.getpid(), 40)")
    assert ended.status == 0
    assert stage.started(2)[1] == "killed by signal 40"


DEAF = "signal.signal(signal.SIGINT, lambda *_: note('asked'))\nnote('ready')\nwhile True: time.sleep(0.05)"


def test_a_deaf_trainer_is_killed_when_its_grace_is_over(stage: SupervisedTrainer) -> None:
    supervisor = stage.start(DEAF, grace_seconds=0.2)
    stage.wait_for("ready")
    supervisor.send_signal(signal.SIGINT)
    ended = stage.end()
    assert ended.status == 128 + signal.SIGKILL
    assert [line for line in ended.lines if "did not end within 0.2 s: killed" in line]
    assert is_gone(stage.started(1)[0])


def test_a_second_signal_kills_at_once(stage: SupervisedTrainer) -> None:
    supervisor = stage.start(DEAF, grace_seconds=1000, repeat_seconds=0)
    stage.wait_for("ready")
    supervisor.send_signal(signal.SIGINT)
    stage.wait_for("asked")
    supervisor.send_signal(signal.SIGINT)
    ended = stage.end()
    assert ended.status == 128 + signal.SIGKILL
    assert [line.partition("holdfast run: ")[2] for line in ended.lines[-2:]] == [
        "second signal: killed",
        "stopped: the trainer ended (killed by SIGKILL)",
    ]


def test_the_same_signal_on_two_ways_is_one(stage: SupervisedTrainer) -> None:
    supervisor = stage.start(
        """
        def leave(*_):
            note("asked")
            wait_for("both sent")
            sys.exit(0)
        signal.signal(signal.SIGINT, leave)
        note("ready")
        while True: time.sleep(0.05)
        """,
        repeat_seconds=1000,
    )
    stage.wait_for("ready")
    supervisor.send_signal(signal.SIGINT)
    stage.wait_for("asked")
    supervisor.send_signal(signal.SIGINT)
    (stage.folder / "both sent").touch()
    assert stage.end().status == 0


def test_a_stop_while_waiting_to_start_again_is_heeded(stage: SupervisedTrainer) -> None:
    supervisor = stage.start("sys.exit(1)", first_backoff_seconds=1000, longest_backoff_seconds=1000)
    assert supervisor.stderr is not None
    assert any("restarting it in" in line for line in supervisor.stderr)
    supervisor.terminate()
    assert stage.end().status == 128 + signal.SIGTERM


CHILDREN = """
child = subprocess.Popen([sys.executable, "-c", "import signal, time\\nsignal.signal(15, signal.SIG_IGN)\\n"
    "while True: time.sleep(1)"])
(folder / f"child-{start}").write_text(str(child.pid))
"""


def test_what_a_dead_trainer_leaves_behind_dies_too(stage: SupervisedTrainer) -> None:
    ended = stage.run(CHILDREN + "progress(start, 1)\nif start < 3: die()")
    assert ended.status == 0
    for start in (1, 2, 3):
        assert is_gone(int((stage.folder / f"child-{start}").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_a_supervisor_that_is_killed_takes_its_trainer_along(stage: SupervisedTrainer) -> None:
    supervisor = stage.start("note('ready')\nwhile True: time.sleep(0.05)")
    stage.wait_for("ready")
    supervisor.kill()
    supervisor.communicate()
    eventually(lambda: is_gone(stage.started(1)[0]))


def test_a_trainer_runs_in_a_group_of_its_own_and_knows_that_it_is_supervised(stage: SupervisedTrainer) -> None:
    found = "os.getpgid(0) == os.getpid(), os.environ['HOLDFAST_SUPERVISED']"
    assert stage.run(f"(folder / 'continue').write_text(repr(({found})))").status == 0
    assert (stage.folder / "continue").read_text() == "(True, '1')"


def test_it_starts_no_trainer_with_torch_in_its_own_memory() -> None:
    program = "import sys, holdfast.supervisor.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def progress_of(*starts: list[tuple[int, int]]) -> list[bool]:
    progress = RestartProgress()
    fruitful = []
    for seen in starts:
        progress.begin_start()
        for iteration, steps in seen:
            progress.update(iteration, steps)
        fruitful.append(progress.end_start())
    return fruitful


def test_a_start_that_never_stepped_was_fruitless() -> None:
    assert progress_of([(0, 0)]) == [False]


def test_a_start_that_repeats_old_iterations_was_fruitless() -> None:
    assert progress_of([(100, 100)], [(95, 5)], [(95, 5)]) == [True, False, False]


def test_starts_that_repeat_ever_fewer_of_the_same_iterations_were_fruitless() -> None:
    assert progress_of([(100, 100)], [(100, 5)], [(100, 3)], [(99, 1)]) == [True, False, False, False]


def test_a_start_that_resumed_later_and_got_further_was_fruitful() -> None:
    preempted = [(300, 70)], [(390, 95)], [(450, 75)]
    assert progress_of([(1000, 1000)], [(250, 50)], *preempted) == [True, False, True, True, True]


def test_iterations_after_a_restore_in_place_are_new() -> None:
    assert progress_of([(1000, 1000), (200, 1001), (210, 1011)], [(215, 5)]) == [True, True]


def test_the_wait_doubles_up_to_its_longest() -> None:
    limits = RestartLimits(first_backoff_seconds=1, longest_backoff_seconds=10)
    for fruitless, longest in ((0, 1), (1, 2), (3, 8), (4, 10), (2000, 10)):
        assert longest / 2 <= limits.backoff_seconds(fruitless) <= longest


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="fruitless starts 0"):
        RestartLimits(fruitless_starts=0)
    with pytest.raises(ValueError, match="grace -1"):
        RestartLimits(grace_seconds=-1)


def test_exits_are_told_in_words_and_as_a_shell_does() -> None:
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_exit(1) == "exit status 1"
    assert (shell_status(-9), shell_status(3), shell_status(0)) == (137, 3, 0)


STUCK = """
from holdfast.system import supervisor_channel as supervision
supervision.enable_stack_dump(0)

def step_quickly():
    for step in range(1, 9):
        progress(step, step)
        time.sleep(0.03)

def stuck_for_ever():
    note("stuck")
    while True: time.sleep(0.05)
"""
HANGS = {"hang_factor": 5.0, "hang_least_seconds": 1.0}
NO_HANG_SECONDS = 3.0
"""Far longer than what is a hang here."""


def test_a_trainer_that_hangs_tells_where_and_is_started_again(stage: SupervisedTrainer) -> None:
    ended = stage.run(STUCK + "step_quickly()\nif start == 1: stuck_for_ever()", **HANGS)
    assert (ended.status, stage.starts) == (0, 2)
    assert stage.started(2)[1] == "killed by SIGKILL because it hung"
    log = "\n".join(ended.lines)
    assert re.search(r"no iteration after 8 for \d+ s; one usually takes", log)
    assert log.index("rank 0:") < log.index("in stuck_for_ever") < log.index(": killed")


def test_a_rank_that_cannot_answer_holds_nobody_up(stage: SupervisedTrainer) -> None:
    body = STUCK + "step_quickly()\nif start == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    ended = stage.run(body, **HANGS)
    assert (ended.status, stage.starts) == (0, 2)
    assert any("no response to the signal" in line for line in ended.lines)


def test_of_a_rank_the_thread_that_trains_is_told_first(stage: SupervisedTrainer) -> None:
    """Others may be many, and a notice is of limited length."""
    other = "import threading\nthreading.Thread(target=lambda: time.sleep(600), daemon=True).start()\n"
    hangs = STUCK + other + "step_quickly()\nif start == 1: stuck_for_ever()"
    log = "\n".join(stage.run(hangs, **HANGS).lines)
    assert log.index("in stuck_for_ever") < log.index("in <lambda>")


def test_a_trainer_that_has_ended_training_may_take_its_time(stage: SupervisedTrainer) -> None:
    body = STUCK + f"step_quickly()\nprogress(8, -8)\ntime.sleep({NO_HANG_SECONDS})"
    assert (stage.run(body, **HANGS).status, stage.starts) == (0, 1)


def test_what_never_stepped_is_no_hang(stage: SupervisedTrainer) -> None:
    assert (stage.run(f"time.sleep({NO_HANG_SECONDS})", **HANGS).status, stage.starts) == (0, 1)


def test_a_stop_that_was_asked_for_is_no_hang(stage: SupervisedTrainer) -> None:
    body = STUCK + "signal.signal(signal.SIGTERM, lambda *_: note('asked'))\nstep_quickly()\nstuck_for_ever()"
    supervisor = stage.start(body, hang_factor=5.0, hang_least_seconds=60.0, grace_seconds=0.5)
    stage.wait_for("stuck")
    supervisor.terminate()
    assert not any("no iteration" in line for line in stage.end().lines)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to the supervisor")
def test_what_a_trainer_has_put_into_sessions_of_their_own_dies_too(stage: SupervisedTrainer) -> None:
    """As torchrun does with every rank."""
    apart = CHILDREN.replace('"])', '"], start_new_session=True)')
    assert apart != CHILDREN
    assert stage.run(apart + "progress(start, 1)\nif start < 3: die()").status == 0
    for start in (1, 2, 3):
        assert is_gone(int((stage.folder / f"child-{start}").read_text()))


def test_a_trainer_that_was_fenced_is_not_started_again(stage: SupervisedTrainer) -> None:
    ended = stage.run("sys.exit(75)")
    assert (ended.status, stage.starts) == (75, 1)
    assert ended.lines[-1].endswith("run: the trainer was fenced; this supervisor ends")


TRAINS = """
from holdfast.system import supervisor_channel as supervision
from holdfast.store import open_store

store = open_store(folder / "store")
attempt = store.acquire_attempt("job", f"uid-{start}")
supervision.publish_attempt(supervision.PublishedAttempt(
    job="job", uid=attempt.uid, attempt=attempt.number, lineage=1, store=store.url, server=None))
"""


def test_a_job_that_others_have_taken_over_is_left_to_them(stage: SupervisedTrainer) -> None:
    ended = stage.run(TRAINS + "store.acquire_attempt('job', 'elsewhere')\ndie()")
    assert (ended.status, stage.starts) == (75, 1)
    assert "attempt 2 of job was started on" in ended.lines[-1]


def test_a_job_that_nobody_has_taken_over_is_started_again(stage: SupervisedTrainer) -> None:
    assert stage.run(TRAINS + "progress(start, 1)\nif start < 3: die()").status == 0
    assert stage.starts == 3


def test_a_trainer_that_dies_before_it_has_said_which_attempt_it_is_is_nobody_else(
    stage: SupervisedTrainer,
) -> None:
    cut_short = "supervision.publish_uid(f'uid-{start}')\nif start == 3: die()\n"
    begun = TRAINS.replace("attempt = ", cut_short + "attempt = ").replace(
        "supervision.publish_attempt(", "if start == 2: die()\nsupervision.publish_attempt("
    )
    ended = stage.run(begun + "progress(start, 1)\nif start < 4: die()")
    assert (ended.status, stage.starts) == (0, 4), ended.lines


def test_the_usual_iteration_is_that_of_the_last_stretches() -> None:
    detector = HangDetector(10.0, 1.0, began=0.0)
    for number in range(1, 4):
        detector.update(number, float(number))
    detector.update(14, 4.0)
    detector.update(14, 9.0)
    assert (detector.typical_seconds, detector.silent_seconds(9.0)) == (1.0, 5.0)
    assert (detector.is_hung(14.0), detector.is_hung(14.1)) == (False, True)
    detector.update(-14, 20.0)
    assert not detector.is_hung(1000.0)


def test_while_few_iterations_are_known_the_usual_one_is_as_long_as_the_longest_start_included() -> None:
    detector = HangDetector(10.0, 1.0, began=0.0)
    detector.update(0, 50.0)
    assert (detector.typical_seconds, detector.is_hung(1e9)) == (None, False)
    detector.update(2, 60.0)
    assert (detector.typical_seconds, detector.is_hung(360.0), detector.is_hung(360.1)) == (30.0, False, True)
    detector.update(3, 61.0)
    detector.update(4, 62.0)
    assert detector.typical_seconds == 30.0
    detector.update(5, 63.0)
    assert detector.typical_seconds == 1.0


def test_a_pause_is_no_hang_and_no_iteration() -> None:
    detector = HangDetector(5.0, 1.0, began=0.0)
    for number in range(1, 9):
        detector.update(number, float(number))
    detector.update(-8, 9.0)
    assert not detector.is_hung(1e9)
    detector.update(8, 1000.0)
    assert not detector.is_hung(1004.0)
    assert detector.is_hung(1006.0)
    detector.update(9, 1001.0)
    assert detector.typical_seconds == 1.0


def test_nothing_hangs_where_nobody_wants_to_know() -> None:
    detector = HangDetector(0.0, 0.0, began=0.0)
    for number in range(1, 9):
        detector.update(number, float(number))
    assert not detector.is_hung(1e9)


def test_folders_that_others_have_made_look_like_a_supervisors_are_left_alone(tmp_path: Path) -> None:
    linked = tmp_path / "holdfast-run-linked"
    linked.mkdir()
    (tmp_path / "target").write_text("theirs")
    (linked / "supervisor.lock").symlink_to(tmp_path / "target")
    away = tmp_path / "away"
    away.mkdir()
    (away / "supervisor.lock").touch()
    (tmp_path / "holdfast-run-elsewhere").symlink_to(away)
    piped = tmp_path / "holdfast-run-own"
    piped.mkdir()
    (piped / "supervisor.lock").touch()
    supervisor_files._remove_abandoned_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "away", "holdfast-run-elsewhere", "holdfast-run-linked", "target",
    ]  # fmt: skip
    assert (away / "supervisor.lock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "holdfast-run-theirs"
    theirs.mkdir()
    (theirs / "supervisor.lock").touch()
    os.chown(theirs, 12345, 12345)
    supervisor_files._remove_abandoned_folders(tmp_path)
    assert theirs.exists()
