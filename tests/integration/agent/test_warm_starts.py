"""Warm starts with real processes: a fork must be what a cold start of the same command is."""

# ruff: noqa: E501  programs of the trainers

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.supervisor.warm_start import WarmStarts, refusal
from holdfast.system import supervisor_channel
from holdfast.system.published_imports import IMPORTS, PublishedImports, state_now
from tests.support.eventually import eventually

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="warm starts need Linux"),
]

HEAVY = "import os\nPID = os.getpid()\n"
TRAINER = """
import sys
initial_modules, initial_names = sorted(sys.modules), list(globals())
import os
{before}
import heavy
import json, pathlib, signal, threading, time
folder = pathlib.Path(sys.argv[1])
start = len(list(folder.glob("start-*"))) + 1
warm = heavy.PID != os.getpid()
(folder / "being-written").write_text(json.dumps([os.getpid(), warm]))
(folder / "being-written").rename(folder / f"start-{{start}}")
if start == 1:
    from holdfast.system.published_imports import ImportsPublisher
    ImportsPublisher(os.environ["HOLDFAST_SUPERVISION"]).update(3)
if start == 1 or pathlib.Path(folder, "hold").exists():
    while not (folder / f"go-{{start}}").exists(): time.sleep(0.01)
if start == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""
VIEW = """
def view():
    import warnings
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    environment = {k: v for k, v in os.environ.items() if k not in ("HOLDFAST_STARTED_AT", "HOLDFAST_PREVIOUS_EXIT")}
    return {
        "modules": initial_modules, "names": initial_names,
        "main": [__name__, __file__, __package__, repr(__doc__), type(__loader__).__name__,
                 __spec__ and [__spec__.name, __spec__.origin], sys.modules["__main__"].__dict__ is globals()],
        "arguments": [sys.argv, sys.orig_argv, sys.executable, repr(sys.flags), sys.warnoptions],
        "path": sys.path, "folder": os.getcwd(), "environment": environment,
        "c environment": sorted(n for n in environment if os.getenvb(n.encode()) is None),
        "filters": [repr(each) for each in warnings.filters],
        "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "status": [line for line in status if line.startswith(("Umask", "SigBlk", "SigIgn", "Threads", "Uid", "Groups"))],
        "limits": pathlib.Path("/proc/self/limits").read_text(),
        "scores": [pathlib.Path("/proc/self/oom_score_adj").read_text(), os.getpriority(os.PRIO_PROCESS, 0)],
        "parents": [os.getppid(), os.getpgid(0) == os.getpid(), os.getsid(0)],
        "files": sorted(os.listdir("/proc/self/fd")),
        "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.seekable()]
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": [threading.main_thread() is threading.current_thread(), threading.active_count(),
                    threading.main_thread().native_id == os.getpid()],
    }
(folder / f"view-{start}").write_text(json.dumps(view()))
"""
QUICK = "first_backoff_seconds=0.01, longest_backoff_seconds=0.05, poll_seconds=0.02"


class WarmTrainer:
    """A folder with a script and a package, and a supervisor that starts the script warm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "lib" / "site-packages"
        self.packages.mkdir(parents=True)
        self.package("heavy", HEAVY)
        self.lines: list[str] = []
        self.running: subprocess.Popen[str] | None = None

    def package(self, name: str, text: str) -> Path:
        (self.packages / name).mkdir()
        (self.packages / name / "__init__.py").write_text(textwrap.dedent(text))
        return self.packages / name / "__init__.py"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": os.pathsep.join([str(self.packages), *filter(None, sys.path)])}

    def start(
        self, body: str, *, before: str = "", module: bool = False, setup: str = "", starts: int = 2
    ) -> None:
        trainer = self.folder / "trainer.py"
        trainer.write_text(TRAINER.format(before=textwrap.dedent(before)) + textwrap.dedent(body))
        words = ["-m", "trainer"] if module else ["trainer.py"]
        self.command = [sys.executable, *words, str(self.folder)]
        program = (
            "import os, sys\n"
            "from holdfast.supervisor.restart_limits import RestartLimits\n"
            "from holdfast.supervisor.supervisor import Supervisor\n"
            f"{setup}\n"
            f"sys.exit(Supervisor({self.command!r}, limits=RestartLimits({QUICK}, fruitless_starts={starts}), warm=True).run())\n"
        )
        self.running = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=self.folder, env=self.environment, start_new_session=True,
        )  # fmt: skip

    def wait_for_line(self, pattern: str) -> str:
        assert self.running is not None
        assert self.running.stderr is not None
        for line in self.running.stderr:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line with {pattern}: {''.join(self.lines)}")

    def let_go(self, start: int) -> None:
        (self.folder / f"go-{start}").touch()

    def run(self, body: str, **options: object) -> int:
        """Run the trainer until it ends; the first start is killed once the next one can be warm."""
        self.start(body, **options)  # type: ignore[arg-type]
        self.wait_for_line("the next start is warm")
        self.let_go(1)
        return self.end()

    def end(self) -> int:
        assert self.running is not None
        self.output, errors = self.running.communicate()
        self.lines += errors.splitlines(keepends=True)
        return self.running.returncode

    def is_warm(self, start: int) -> bool:
        return bool(json.loads((self.folder / f"start-{start}").read_text())[1])

    def pid(self, start: int) -> int:
        return int(json.loads((self.folder / f"start-{start}").read_text())[0])

    @property
    def log(self) -> str:
        return "".join(self.lines)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[WarmTrainer]:
    trainer = WarmTrainer(tmp_path)
    yield trainer
    if trainer.running is not None:
        if trainer.running.poll() is None:
            trainer.running.kill()
        for pipe in (trainer.running.stdout, trainer.running.stderr):
            assert pipe is not None
            pipe.close()
        trainer.running.wait()


def templates(folder: Path) -> list[int]:
    """Return the processes with the imports whose trainer's files are in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"warm_template.py" in words and os.fsencode(folder) in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_warm_start_finds_what_a_cold_one_finds(trainer: WarmTrainer, module: bool) -> None:
    """The first start cannot run VIEW: it is killed. The third one is cold, since a package has changed."""
    body = VIEW + f"if start == 2: (folder / 'lib/site-packages/heavy/__init__.py').write_text({HEAVY + '#'!r})\n"
    status = trainer.run(body + "sys.exit(0 if start == 3 else 1)", module=module, starts=4)
    assert status == 0, trainer.log
    assert [trainer.is_warm(start) for start in (1, 2, 3)] == [False, True, False]
    warm, cold = (json.loads((trainer.folder / f"view-{start}").read_text()) for start in (2, 3))
    for what in cold:
        assert warm[what] == cold[what]
    assert "heavy/__init__.py has changed since its import" in trainer.log
    assert not templates(trainer.folder)


ENDS = {
    "exit": "sys.exit(3)",
    "text": "sys.exit('the end')",
    "exception": "def f(): raise ValueError('end') from KeyError('cause')\nf()",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)",
    "at once": "os._exit(4)",
    "at exit": "import atexit\natexit.register(print, 1)\nthreading.Thread(target=lambda: print('thread')).start()",
    "hook": "sys.excepthook = lambda *a: print('hook', a[0].__name__, file=sys.stderr)\n1 / 0",
    "broken": "exec(compile('1 +', 'inner.py', 'exec'))",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_warm_start_ends_as_a_cold_one(trainer: WarmTrainer, end: str, module: bool) -> None:
    trainer.run("print('begun', flush=True)\nif start > 1:\n" + textwrap.indent(ENDS[end], "    "), module=module)
    assert trainer.is_warm(2)
    (trainer.folder / "start-3").touch()
    cold = subprocess.run(
        trainer.command, cwd=trainer.folder, env=trainer.environment, capture_output=True, text=True, check=False
    )
    status = cold.returncode
    expected = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    assert expected in trainer.log
    assert cold.stdout in trainer.output
    assert cold.stderr in re.sub(r"^\d{4}-.*\n", "", trainer.log, flags=re.MULTILINE)


def test_a_script_with_a_wrong_syntax_is_reported_as_by_python(trainer: WarmTrainer) -> None:
    trainer.start("")
    trainer.wait_for_line("the next start is warm")
    (trainer.folder / "trainer.py").write_text("x = = 1\n")
    trainer.let_go(1)
    trainer.end()
    cold = subprocess.run(
        trainer.command, cwd=trainer.folder, env=trainer.environment, capture_output=True, text=True, check=False
    )
    assert ", warm" in trainer.log
    assert cold.stderr in re.sub(r"^\d{4}-.*\n", "", trainer.log, flags=re.MULTILINE)
    assert "warm_template" not in re.sub(r"^\d{4}-.*\n", "", trainer.log, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("os.environ['HEAVY'] = '1'", r"os.environ\['HEAVY'\] was changed before the import of heavy"),
        ("sys.path.insert(0, '/nowhere')", "sys.path was changed before the import of heavy"),
        ("import warnings; warnings.simplefilter('ignore')", "the warning filters was changed before"),
    ],
)
def test_what_a_script_sets_before_an_import_makes_the_start_cold(
    trainer: WarmTrainer, before: str, reason: str
) -> None:
    """Also if the script undoes it, which a look at the process afterwards would not show."""
    undo = "os.environ.pop('HEAVY', None); sys.path[:] = [p for p in sys.path if p != '/nowhere']\n"
    undo += "import warnings; warnings.resetwarnings()\n" if "warnings" in before else ""
    assert trainer.run(undo, before=before) == 0
    assert re.search(f"cold: {reason}", trainer.log)
    assert not trainer.is_warm(2)
    assert trainer.log.count("restarting it") == 1


def test_what_a_script_sets_before_it_imports_holdfast_leaves_the_first_restart_warm(trainer: WarmTrainer) -> None:
    """As `seed_everything` of Lightning does, before the entry point of Holdfast is loaded."""
    trainer.package("special", HEAVY)
    before = "import heavy\nos.environ['SEED'] = '1'\nimport holdfast.units\nimport special"
    body = "(folder / 'special').write_text(f'{special.PID == os.getpid()} {os.environ[\"SEED\"]}')\n"
    assert trainer.run(body, before=before) == 0
    assert trainer.is_warm(2)
    assert (trainer.folder / "special").read_text() == "True 1"
    assert (
        "imported anew at each start: holdfast (os.environ['SEED'] was changed before its import)" in trainer.log
    )
    assert "cold: " not in trainer.log


@pytest.mark.parametrize(
    ("effect", "reason"),
    [
        ("print('imported')", "the output"),
        ("file = open('/dev/zero')", "the open files"),
        ("import socket; pair = socket.socketpair()", "the open files"),
        ("import signal; signal.set_wakeup_fd", None),
        ("import sys; sys.excepthook = lambda *a: None", "the hooks of the interpreter"),
        ("import subprocess; child = subprocess.Popen(['sleep', '60'])", "the child processes"),
        ("os.umask(0o77)", "the inherited attributes"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "a thread",
        ),
        ("raise ImportError('not alone') if 'warm_template' in sys.argv[0] else 0", "its import alone fails"),
    ],
)
def test_a_package_whose_import_a_fork_cannot_repeat_is_excluded(
    trainer: WarmTrainer, effect: str, reason: str | None
) -> None:
    if effect.startswith("raise"):
        effect = "import sys\nif 'warm_template' in sys.argv[0]: raise ImportError('not alone')"
    trainer.package("special", f"import os\nPID = os.getpid()\n{effect}\n")
    body = "(folder / 'special').write_text(str(special.PID == os.getpid()))\n"
    assert trainer.run(body, before="import special") == 0
    assert trainer.is_warm(2)
    assert (trainer.folder / "special").read_text() == str(reason is not None)
    assert reason is None or re.search(f"imported anew at each start: special \\(.*{reason}", trainer.log)


def test_effects_of_an_import_appear_when_the_script_imports_it(trainer: WarmTrainer) -> None:
    trainer.package(
        "special", "import os, warnings\nos.environ['SPECIAL'] = '1'\nwarnings.simplefilter('ignore')\n"
    )
    body = "(folder / 'seen').write_text(f'{seen} {os.environ.get(\"SPECIAL\")}')\n"
    assert trainer.run(body, before="seen = os.environ.get('SPECIAL')\nimport special") == 0
    assert trainer.is_warm(2)
    assert (trainer.folder / "seen").read_text() == "None 1"


def test_random_generators_differ_between_forks(trainer: WarmTrainer) -> None:
    trainer.package("special", "import random, numpy, multiprocessing.process\n")
    body = """
    import random, numpy, multiprocessing
    key = bytes(multiprocessing.current_process().authkey).hex()
    (folder / f"random-{start}").write_text(f"{random.random()} {numpy.random.random()} {key}")
    sys.exit(1 if start < 3 else 0)
    """
    assert trainer.run(body, before="import special", starts=4) == 0
    assert trainer.is_warm(2)
    assert trainer.is_warm(3)
    one, other = ((trainer.folder / f"random-{start}").read_text().split() for start in (2, 3))
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_killed_supervisor_leaves_neither_template_nor_trainer(trainer: WarmTrainer) -> None:
    (trainer.folder / "hold").touch()
    trainer.start("")
    trainer.wait_for_line("the next start is warm")
    trainer.let_go(1)
    trainer.wait_for_line("start 2.*, warm")
    eventually((trainer.folder / "start-2").exists)
    pid = trainer.pid(2)
    assert templates(trainer.folder)
    assert trainer.running is not None
    trainer.running.kill()
    eventually(lambda: not templates(trainer.folder))
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_sigterm_reaches_a_warm_trainer(trainer: WarmTrainer) -> None:
    (trainer.folder / "hold").touch()
    trainer.start("", before="import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))")
    trainer.wait_for_line("the next start is warm")
    trainer.let_go(1)
    trainer.wait_for_line("start 2.*, warm")
    eventually((trainer.folder / "start-2").exists)
    assert trainer.running is not None
    trainer.running.terminate()
    assert trainer.end() == 0
    assert not templates(trainer.folder)


def test_the_template_is_given_up_when_memory_is_short(trainer: WarmTrainer) -> None:
    setup = (
        "from holdfast.supervisor import warm_start\n"
        "warm_start.free_memory_share = lambda: 0.01 if os.path.exists('short') else 1.0\n"
    )
    trainer.start("", setup=setup)
    trainer.wait_for_line("the next start is warm")
    (trainer.folder / "short").touch()
    trainer.wait_for_line("memory is short")
    eventually(lambda: not templates(trainer.folder))
    trainer.let_go(1)
    assert trainer.end() == 0
    assert not trainer.is_warm(2)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["torchrun", "train.py"], "torchrun starts the processes that train"),
        (["uv", "run", "train.py"], "uv starts the processes that train"),
        (["sh", "-c", "python train.py"], "sh starts the processes that train"),
        ([sys.executable, "-c", "pass"], "the option -c"),
        ([sys.executable, "-i", "train.py"], "the option -i"),
        ([sys.executable, "missing.py"], "missing.py is no file"),
        ([sys.executable], "the command names no script"),
    ],
)
def test_a_command_that_is_no_script_is_started_cold(command: list[str], reason: str) -> None:
    assert reason in (refusal(command, dict(os.environ)) or "")


def test_a_trainer_that_is_killed_after_it_published_its_imports_does_not_turn_warm_starts_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", ""]
    with subprocess.Popen(command) as trainer:
        os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
        imports = PublishedImports(
            pid=trainer.pid, executable=sys.executable, orig_argv=command, main="", modules=[], folders=[],
            first_state=state_now(), state=state_now(),
        )  # fmt: skip
        supervisor_channel.write_struct(tmp_path / IMPORTS, imports)
        WarmStarts(command, tmp_path, lambda: 1.0).watch(trainer.pid)
    assert "starts are cold" not in capfd.readouterr().err


def test_a_script_that_starts_itself_anew_is_started_cold(trainer: WarmTrainer) -> None:
    before = """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)
    """
    trainer.start("", before=before)
    trainer.wait_for_line("starts are cold: the script re-executes itself in another environment")
    trainer.let_go(1)
    assert trainer.end() == 0
    assert not trainer.is_warm(2)
