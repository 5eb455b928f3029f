"""A process that has imported what a trainer imports, and whose forks run the trainer's script: warm starts.

    python [OPTIONS] warm_template.py SOCKET CAPTURE IMPORTS EXCLUDED script.py|-m module [ARGUMENTS]

It runs as a file in the trainer's interpreter and imports only the standard library. A fork begins with the
modules of a new interpreter. `HiddenModules` adds a preloaded module when the script imports it, provided that the
environment, `sys.path` and the warning filters are those under which it was imported here. Otherwise it ends the
start, and the supervisor starts the trainer cold.

One module, since it must run as one file. Linux only.
"""

from __future__ import annotations

import sys

NEW_INTERPRETER = frozenset(sys.modules) - {"__future__"}
"""The modules of an interpreter that has just started."""
NEW_MAIN = {name: value for name, value in globals().items() if name.startswith("__")}

import runpy

NEW_MODULE_RUN = frozenset(sys.modules) - {"__future__"}

# ruff: noqa: E402
import array
import contextlib
import contextvars
import ctypes
import fcntl
import importlib
import io
import json
import os
import signal
import socket
import termios
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

ENDED = "warm-start-ended.json"
"""File in the supervisor's folder: why a warm start ended, and at the import of which module."""
MAX_EXCLUDED = 5
STAGES = ("holdfast", "late")
"""Names that exclude what the script imported from the import of Holdfast on, or from the session on."""
NICENESS = 10
OOM_SCORE = "800"
"""Of 1,000. If memory runs out, the kernel kills this process before any other of the job."""
PROBE_SECONDS = 20
THREAD_END_SECONDS = 5.0
HOLDFAST = str(Path(__file__).resolve().parents[1]) + os.sep
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PR_SET_PDEATHSIG = 1


class State(NamedTuple):
    """What an import may read and a script may set before it."""

    environment: dict[str, str]
    path: list[str]
    filters: list[Any]

    @classmethod
    def now(cls) -> State:
        return cls(dict(os.environ), list(sys.path), list(warnings.filters))

    def apply(self) -> None:
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.path[:] = self.path
        warnings.filters[:] = self.filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    def difference(self, other: State) -> str | None:
        """Name what differs between two states."""
        if self.environment != other.environment:
            return f"os.environ[{min(self.environment.items() ^ other.environment.items())[0]!r}]"
        if self.path != other.path:
            return "sys.path"
        return "the warning filters" if self.filters != other.filters else None


@dataclass
class Import:
    """One import: the state before and after it, and the modules of other packages than Python that it added."""

    name: str
    before: State
    after: State
    modules: list[str] = field(default_factory=list)
    adds_threads: bool = False

    @property
    def has_effect(self) -> bool:
        return self.before.difference(self.after) is not None


class Unusable(Exception):
    """The module `name` must not be imported ahead; an empty name: no start can be warm."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class HiddenModules:
    """The finder of preloaded modules in a fork; the first in `sys.meta_path` until it has served them all.

    Args:
        modules: preloaded modules by name; those of the standard library belong to no import.
        imports: the imports that were done ahead, in their order.
        folder: the supervisor's folder.
    """

    def __init__(self, modules: dict[str, types.ModuleType], imports: Sequence[Import], folder: str) -> None:
        self._modules, self._folder, self._pid = modules, folder, os.getpid()
        self._imports = list(imports)
        """The imports that were not repeated yet."""
        self._expected = State.now()
        """The state unless the script has changed it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._modules.get(name)
        if module is None:
            return None
        original = module.__spec__
        spec = ModuleSpec(name, PreloadedLoader(self, module))  # type: ignore[arg-type]
        if original is not None:
            spec.origin = original.origin
            spec.submodule_search_locations = original.submodule_search_locations
            spec.has_location, spec.cached = original.has_location, original.cached
        return spec

    def reveal(self, name: str) -> None:
        """Add a module to `sys.modules` with what its import added. End the start if a cold one could differ.

        Earlier imports that the script has not repeated were part of this one: they are listed in the order of
        their ends.
        """
        names = [name]
        place = next((place for place, each in enumerate(self._imports) if name in each.modules), None)
        if place is not None:
            root = self._imports[place].name
            if (changed := State.now().difference(self._expected)) is not None:
                self._end_start(root, f"{changed} was changed before the import of {name}")
            repeated = self._imports[: place + 1]
            if name == root:
                del self._imports[: place + 1]
                names = [each for one in repeated for each in one.modules]
                repeated[-1].after.apply()
                self._expected = repeated[-1].after
            elif any(each.has_effect for each in repeated):
                self._end_start(root, f"{name} is imported before {root}")
        for each in names:
            if (module := self._modules.pop(each, None)) is not None:
                sys.modules[each] = module
        if not self._modules:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)

    def _end_start(self, name: str, reason: str) -> None:
        written = Path(self._folder, f"{ENDED}.{os.getpid()}")
        written.write_text(json.dumps({"name": name, "reason": reason}))
        written.rename(Path(self._folder, ENDED))
        os.kill(self._pid, signal.SIGKILL)  # nothing of this start may run on, its exit functions included
        os.kill(os.getpid(), signal.SIGKILL)


class PreloadedLoader:
    """The loader of one preloaded module; as the module's own loader, but it does not run the module again."""

    def __init__(self, hidden: HiddenModules, module: types.ModuleType) -> None:
        self._hidden, self._module, self._spec = hidden, module, module.__spec__
        self._own = getattr(self._spec, "loader", None)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        self._hidden.reveal(spec.name)
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def inherited_attributes() -> list[object]:
    """Return what a process inherits: limits, signals, processors, niceness, folder, control group and others."""
    status, here = _read("/proc/thread-self/status").splitlines(), os.stat(".")
    starts = ("Umask:", "SigBlk:", "SigIgn:", "Uid:", "Gid:", "Groups:")
    lines = [line for line in status if line.startswith(starts)]
    texts = [_read("/proc/self/limits"), _read("/proc/self/cgroup"), *lines]
    numbers = [os.getpriority(os.PRIO_PROCESS, 0), here.st_dev, here.st_ino, os.getsid(0)]
    return [*texts, *numbers, *sorted(os.sched_getaffinity(0))]


class Template:
    """The imports that are done ahead.

    Args:
        capture: descriptor of the reading end of this process's output.
        imports: what the trainer has published of its imports.
        excluded: names that are not imported ahead, or one of `STAGES`.
    """

    def __init__(self, capture: int, imports: dict[str, Any], excluded: Sequence[str]) -> None:
        self._capture, self.published, self._excluded = capture, imports, excluded
        self._last_stage = next((number for number, name in enumerate(STAGES) if name in excluded), len(STAGES))
        self._unusable: Unusable | None = None
        self._torch: list[object] = []
        self.imports: list[Import] = []
        self.before = State.now()
        self.began = time.time()
        self._folders = _folder_stamps()
        self._files: dict[str, object] = {}

    def prepare(self) -> None:
        """Do all imports. Unusable: one must be excluded, or nothing may be imported ahead."""
        if sys.executable != self.published["executable"]:
            raise Unusable("", f"the script runs in {self.published['executable']}, not {sys.executable}")
        if sys.gettrace() is not None or sys.getprofile() is not None:
            raise Unusable("", "a tracer or profiler is active")
        if not sys.flags.safe_path and sys.path[0] not in self.published["state"][1]:
            raise Unusable("", "the script changes sys.path[0]")
        hiding = {Path(name).stem for name in self._folders.get(sys.path[0], ())} & sys.stdlib_module_names
        if hiding and not sys.flags.safe_path:
            raise Unusable("", f"the script's folder hides modules of Python: {', '.join(sorted(hiding))}")
        context = contextvars.copy_context()
        # on a thread, since a process that has lowered its priority may not raise it again
        thread = threading.Thread(target=context.run, args=(self._import_all,))
        thread.start()
        thread.join()
        # a fork would copy the locks that the ending thread holds
        _wait_until(lambda: not os.path.exists(f"/proc/self/task/{thread.native_id}"))
        if self._unusable is not None:
            raise self._unusable
        for variable, value in context.items():
            variable.set(value)
        if not self.imports:
            raise Unusable("", "nothing can be imported ahead")
        if self._torch != _torch_settings():
            raise Unusable("", "an import changes settings of torch for its thread")
        _probe()  # OpenBLAS ends its threads before a fork, and starts them again when it needs them
        if not _wait_until(lambda: _threads() == 1):
            adding = [each.name for each in self.imports if each.adds_threads]
            raise Unusable(adding[-1] if adding else "", "an import leaves a thread")
        if self._last_stage == len(STAGES) and self._changed(self.published["state"]) is not None:
            raise Unusable("late", "the script changes the environment, sys.path or the warning filters")
        self._files = _file_stamps()
        if any(stamp[0] > self.began * 1e9 for stamp in self._files.values()):  # type: ignore[index]
            raise Unusable("", "a package changed while it was imported")

    def changed(self) -> str | None:
        """Name a package that was changed since it was imported."""
        folders, files = _folder_stamps(), _file_stamps(self._files)
        for before, after in ((self._folders, folders), (self._files, files)):
            for path in before.keys() | after.keys():
                if before.get(path) != after.get(path):
                    return path
        return None

    def _import_all(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            stages = {name: stage for name, _, stage in self.published["modules"]}
            later = next((name for name in self._wanted() if stages[name]), None)
            for name in self._wanted():
                if name == later and (what := self._changed(self.published["first_state"])) is not None:
                    raise Unusable("holdfast", f"{what} was changed before its import")
                if name not in sys.modules:
                    self._import(name)
            self._torch = _torch_settings()
        except Unusable as error:
            self._unusable = error
        except BaseException as error:  # a warm start is never worth an error
            self._unusable = Unusable("", f"{type(error).__name__}: {error}")

    def _wanted(self) -> list[str]:
        """Return the modules to import, in the order in which the script began to import them.

        `sys.modules` has a package after the modules that its import imported. The folders say which came first.
        """
        places = {folder: place for place, folder in enumerate(self.published["folders"])}
        modules = [
            (name, os.path.dirname(origin), os.path.basename(origin) == "__init__.py")
            for name, origin, stage in self.published["modules"]
            if stage <= self._last_stage and _is_installed(origin) and not self._excludes(name)
        ]
        packages = sorted(
            (places[folder], name) for name, folder, is_package in modules if is_package and folder in places
        )
        wanted = []
        for name, folder, _ in modules:
            while packages and packages[0][0] <= places.get(folder, -1):
                wanted.append(packages.pop(0)[1])
            wanted.append(name)
        return wanted

    def _import(self, name: str) -> None:
        names, before, attributes, threads = set(sys.modules), State.now(), self._attributes(), _threads()
        try:
            importlib.import_module(name)
        except BaseException as error:  # an import may raise anything
            raise Unusable(name, f"its import alone fails ({type(error).__name__}: {error})") from error
        after = self._attributes()
        for what in attributes:
            if attributes[what] != after[what]:
                raise Unusable(name, f"its import changes {what}")
        done = Import(name, before, State.now(), adds_threads=_threads() > threads)
        for each in [each for each in sys.modules if each not in names]:
            origin = _origin(sys.modules[each])
            is_standard = _is_standard(each, origin)
            if self._excludes(each) or not (is_standard or origin is None or _is_installed(origin)):
                raise Unusable(name, f"its import imports {each if self._excludes(each) else origin}")
            done.modules += [] if is_standard else [each]
        self.imports.append(done)

    def _excludes(self, name: str) -> bool:
        return any(name == each or name.startswith(f"{each}.") for each in self._excluded)

    def _attributes(self) -> dict[str, object]:
        """Return what an import may change that a fork would not have as a cold start has it."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._capture, termios.FIONREAD, waiting)
        children = [_read(path) for path in Path("/proc/self/task").glob("*/children")]
        return {
            "the open files": _open_files(),
            "the child processes": sorted(" ".join(children).split()),
            "the signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
            "the inherited attributes": inherited_attributes(),
            "the hooks of the interpreter": [sys.excepthook, sys.displayhook, sys.unraisablehook, sys.gettrace()],
            "the standard streams": [id(each) for each in (sys.stdin, sys.stdout, sys.stderr)],
            "the output": waiting[0],
        }

    def _changed(self, published: Sequence[Any]) -> str | None:
        """Name what in a state that the script had was not only changed by these imports."""
        now = State.now()
        return now._replace(filters=[repr(each) for each in now.filters]).difference(State(*published))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Wait until threads have ended; return whether they have."""
    until = time.monotonic() + THREAD_END_SECONDS
    while not (is_met := condition()) and time.monotonic() < until:
        time.sleep(0.001)
    return is_met


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _is_installed(origin: str) -> bool:
    return "/site-packages/" in origin or "/dist-packages/" in origin or origin.startswith(HOLDFAST)


def _is_standard(name: str, origin: str | None) -> bool:
    """Return whether a module belongs to Python."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    return origin is not None and origin.startswith(STANDARD_LIBRARY) and not _is_installed(origin)


def _origin(module: object) -> str | None:
    """Return the file of a module, or `None` if it has none."""
    spec = vars(module).get("__spec__") if isinstance(module, types.ModuleType) else None
    return spec.origin if spec is not None and spec.has_location else None


def _folder_stamps() -> dict[str, Any]:
    """Return what can be imported from each entry of `sys.path`, and the state of the RECORDs there."""
    found: dict[str, Any] = {}
    for entry in dict.fromkeys(sys.path):
        names = set()
        with contextlib.suppress(OSError):
            for name in os.listdir(entry or "."):
                path = os.path.join(entry, name)
                if name.endswith((".py", ".so")) or os.path.exists(os.path.join(path, "__init__.py")):
                    names.add(name)
                elif name.endswith((".pth", ".dist-info")):
                    names.add(name)
                    record = path if name.endswith(".pth") else os.path.join(path, "RECORD")
                    found[record] = _stamp(record)
        found[entry] = names
    return found


def _file_stamps(files: Sequence[str] | dict[str, object] = ()) -> dict[str, object]:
    """Return the state of files; by default, of those of all modules."""
    origins = files or [path for module in list(sys.modules.values()) if (path := _origin(module)) is not None]
    return {path: stamp for path in origins if (stamp := _stamp(path)) is not None}


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _torch_settings() -> list[object]:
    """Return settings that torch keeps for each thread."""
    torch: Any = sys.modules.get("torch")
    names = ("is_grad_enabled", "is_inference_mode_enabled", "get_num_threads") if torch is not None else ()
    return [getattr(torch, name)() for name in names]


def _probe() -> None:
    """Show in a fork that matrix products work and that no device was initialized. Unusable: they do not."""
    numpy, torch = map(sys.modules.get, ("numpy", "torch"))
    if torch is not None and torch.cuda.is_initialized():
        raise Unusable("", "an import initializes a device")
    if (pid := os.fork()) == 0:
        signal.alarm(PROBE_SECONDS)
        status = 1
        try:
            for library in filter(None, (numpy, torch)):
                library.ones((256, 256)) @ library.ones((256, 256))
            status = 0
        finally:
            os._exit(status)
    if status := os.waitpid(pid, 0)[1]:
        raise Unusable("", f"a fork cannot compute ({os.waitstatus_to_exitcode(status)})")


class Forked(NamedTuple):
    """What the supervisor requests of a fork."""

    environment: dict[str, str]
    supervisor: int
    oom_score: str
    folder: str


def serve(line: socket.socket, template: Template) -> Forked:
    """Answer the supervisor until it is gone. Returns in forked processes only."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not request:
            sys.exit(0)
        wanted = json.loads(request)
        control = socket.socket(fileno=descriptors[2])
        reason = template.changed()
        if reason is not None:
            reason = f"{reason} has changed since its import"
        elif wanted.pop("attributes") != json.loads(json.dumps(inherited_attributes())):
            reason = "limits, priority, folder or control group of the supervisor have changed"
        if reason is not None:
            control.sendall(json.dumps({"cold": reason}).encode())
        elif (between := os.fork()) == 0:
            # the process between ends at once, so that the supervisor adopts the other one
            if os.fork() != 0:
                os._exit(0)
            line.close()
            forked = Forked(**wanted)
            _become_trainer(forked, template, control, descriptors)
            return forked
        else:
            os.waitpid(between, 0)
        control.close()
        for fd in descriptors[:2]:
            os.close(fd)


def _become_trainer(
    forked: Forked, template: Template, control: socket.socket, descriptors: Sequence[int]
) -> None:
    """Give a fork the attributes that a cold start has, and wait until the supervisor knows it."""
    os.setpgid(0, 0)
    while os.getppid() != forked.supervisor and not _has_closed(control):
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != forked.supervisor:
        os._exit(1)
    os.close(template._capture)
    for source, target in ((null := os.open(os.devnull, os.O_RDWR), 0), (descriptors[0], 1), (descriptors[1], 2)):
        os.dup2(source, target)
    for fd in {null, *descriptors[:2]} - {0, 1, 2}:
        os.close(fd)
    Path("/proc/self/oom_score_adj").write_text(forked.oom_score)
    if not sys.stdout.write_through:  # type: ignore[union-attr]
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    control.sendall(json.dumps({"pid": os.getpid()}).encode())
    if control.recv(1) != b"\0":  # the supervisor is gone, or has given up
        os._exit(1)
    control.close()


def _has_closed(control: socket.socket) -> bool:
    """Return whether the supervisor is gone."""
    try:
        return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def run(forked: Forked, template: Template, words: Sequence[str]) -> None:
    """Run the script as a new interpreter does. Returns or raises as the script."""
    module = words[1] if words[0] == "-m" else None
    options = sys.orig_argv[1 : sys.orig_argv.index(sys.argv[0])]
    sys.orig_argv[:] = [sys.orig_argv[0], *options, *words]
    sys.argv[:] = ["-m", *words[2:]] if module else words
    visible = NEW_MODULE_RUN if module else NEW_INTERPRETER
    hidden = {name: each for name, each in sys.modules.items() if name not in visible}
    for name in hidden:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    vars(main).update(NEW_MAIN, __doc__=None)
    sys.modules["__main__"] = main
    state = template.before
    for each in template.imports:
        each.before, each.after = (_in_environment(forked, state, it) for it in (each.before, each.after))
    _in_environment(forked, state, state).apply()
    importlib.invalidate_caches()
    sys.meta_path.insert(0, HiddenModules(hidden, template.imports, forked.folder))
    try:
        if module:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        else:
            _run_script(template.published["main"], main)
    except SystemExit:
        raise
    except BaseException as error:  # whatever the script raises is shown without the frames of this file
        hook, trace = sys.excepthook, error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next

        def show(kind: type[BaseException], value: BaseException, _: object) -> None:
            hook(kind, value.with_traceback(trace), trace)

        sys.excepthook = show
        raise


def _in_environment(forked: Forked, before: State, state: State) -> State:
    """Return a state of this process as it would be in the environment of a start."""
    environment = forked.environment | dict(state.environment.items() - before.environment.items())
    for name in before.environment.keys() - state.environment.keys():
        environment.pop(name, None)
    return State(environment, state.path, state.filters)


def _run_script(path: str, main: types.ModuleType) -> None:
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))  # noqa: S102  the user's script


def main() -> None:
    line_fd, capture_fd, imports, excluded_json, *words = sys.argv[1:]
    line, capture = socket.socket(fileno=int(line_fd)), int(capture_fd)
    Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    template = Template(capture, json.loads(Path(imports).read_bytes()), json.loads(excluded_json))
    try:
        template.prepare()
    except Unusable as error:
        line.send(json.dumps({"unusable": error.name, "reason": str(error)}).encode())
        return
    line.send(json.dumps({"ready": sum(len(each.modules) for each in template.imports)}).encode())
    run(serve(line, template), template, words)


if __name__ == "__main__":
    main()
