"""Ctrl-C while a checkpoint begins: whatever it cuts short, that one settles, and the next one is taken."""

import contextlib
import linecache
import sys
from pathlib import Path

from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.saver import Saver
from tests.support.small_session import iterate, session_of

CUT_SHORT = ("reports.py", "run.py", "saver.py", "history.py", "persister.py", "snapshotter.py")


class Interrupting:
    """Raises KeyboardInterrupt before one of the lines that a checkpoint takes on the training thread."""

    def __init__(self, at):
        self._left = at
        self.where = None

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if frame.f_code.co_name in ("__enter__", "__exit__") and Path(file).name == "threading.py":
            # a lock that is taken or released by Python code stays locked when Ctrl-C comes there
            file, line = frame.f_back.f_code.co_filename, frame.f_back.f_lineno
            is_cut_short = Path(file).name in CUT_SHORT and "holdfast" in file
            if is_cut_short:
                self._interrupt(f"{file}:{line}")
            return None
        if Path(file).name not in CUT_SHORT or "holdfast" not in file:
            return None
        # also traced when the block ends, where no signal is handled before the lock is released
        if event == "line" and not linecache.getline(file, line).lstrip().startswith("with "):
            self._interrupt(f"{file}:{line}")
        return self._trace

    def _interrupt(self, where):
        self._left -= 1
        if not self._left:
            self.where = where
            sys.settrace(None)
            raise KeyboardInterrupt


def test_ctrl_c_at_any_line_of_a_take_costs_at_most_that_checkpoint(tmp_path, monkeypatch):
    model, optimizer, session = session_of(str(tmp_path), keep=3)
    saver, take = session._saver, Saver.take
    session.resume()
    while saver.history.head is None:
        iterate(model, optimizer, session)
        saver.wait_settled(300)
    lines, cut = 0, Interrupting(1)
    while lines == 0 or cut.where is not None:
        lines, cut = lines + 1, Interrupting(lines + 1)

        def take_cut_short(*arguments, cut=cut, **options):
            with cut:
                return take(*arguments, **options)

        session.checkpoint()
        with monkeypatch.context() as patch:
            patch.setattr(Saver, "take", take_cut_short)
            with contextlib.suppress(KeyboardInterrupt):
                iterate(model, optimizer, session)
        assert saver.wait_settled(300), cut.where
        iterate(model, optimizer, session)
        assert saver.wait_settled(300), cut.where
        assert parse_checkpoint_id(saver.history.head)[0] == session.iteration, cut.where
    assert lines > 60
    session.close()
