"""What docs/emulator.md shows is what happens: its example runs, its handler is the real one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from fa2_cute.emulator import errors
from fa2_cute.emulator.ops import integer

PAGE = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_example_runs_and_prints_what_the_page_says(capsys):
    exec(compile(blocks("python")[0], "docs/emulator.md", "exec"), {})
    assert capsys.readouterr().out == blocks("text")[0]


def test_the_worked_instruction_is_the_real_one():
    assert blocks("python")[1].strip() == inspect.getsource(integer.dp4a).strip()


def test_every_error_is_described():
    names = [n for n, c in vars(errors).items() if isinstance(c, type) and c.__module__ == errors.__name__]
    assert len(names) > 15
    assert not [n for n in names if f"`{n}`" not in PAGE]
