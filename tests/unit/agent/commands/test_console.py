from __future__ import annotations

import os
import sys

import pytest
import typer

from holdfast.commands.console import say
from holdfast.commands.stores.arguments import opened


def test_a_command_ends_without_a_message_if_the_reader_of_its_output_has_ended(monkeypatch, tmp_path, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(typer.Exit) as ended, opened(str(tmp_path)):
            say("a line")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == ""
