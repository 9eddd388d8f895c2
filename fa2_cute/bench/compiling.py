"""The section ``compile``: the first call of a new process, with compiled kernels on disk and without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from .first_call import IMPORT, PROBLEMS
from .peers import FA4, OURS, last_line
from .results import Cell, Figure, Section
from .roofline import Wrong
from .session import OUT_OF_TIME, Session

REPEATS = 4
TIMEOUT = 300
WARM, COLD = "kernels on disk", "nothing on disk"
Times = dict[str, list[float]]  # milliseconds by problem, and of the import


def run(session: Session, problems: Sequence[str] = tuple(PROBLEMS)) -> Section:
    """The section; all of it is measured in new processes, one by one. Raises Wrong where one of ours fails."""
    libraries = [OURS] + ([FA4] if session.takes_part(FA4) and not session.quick else [])
    found: dict[str, tuple[Times, Times]] = {}
    missing: dict[str, str] = {}
    for library in libraries:
        if session.is_late():
            missing[library] = OUT_OF_TIME
            continue
        session.say(f"compile {library}")
        try:
            found[library] = _first_calls(session, library, problems)
        except subprocess.SubprocessError as error:
            if library == OURS:
                raise Wrong(f"a process that makes first calls failed: {last_line(error)}") from error
            missing[library] = last_line(error)
    names = {problem: ("" if problem == problems[0] else "then: ") + problem for problem in problems}
    cells = [
        Cell(name, group, 0.0, {library: Figure.of(times[i][key]) for library, times in found.items()}, missing)
        for i, group in enumerate((WARM, COLD))
        for key, name in {**names, IMPORT: "import, after torch's"}.items()
    ]
    return Section(
        name="compile",
        title="First call of a new process, after the imports of torch and of the package",
        unit="ms",
        work_unit="",
        contestants=tuple(libraries),
        peers=(),
        cells=tuple(cells),
    )


def _first_calls(session: Session, library: str, problems: Sequence[str]) -> tuple[Times, Times]:
    """(with kernels on disk, without)."""
    repeats = 1 if library != OURS or session.quick else REPEATS
    asked = {"library": library, "problems": list(problems), "device": str(session.device)}
    with tempfile.TemporaryDirectory(prefix="fa2_cute-bench-") as folder:
        runs = [_process(asked, folder) for _ in range(1 + repeats)]
    keys = [*problems, IMPORT]
    return {key: [x[key] for x in runs[1:]] for key in keys}, {key: [runs[0][key]] for key in keys}


def _process(asked: dict, folder: str) -> dict[str, float]:
    """What a new process prints, whose kernels are kept in ``folder``.

    Raises SubprocessError where it fails, or prints something else.
    """
    environment = {
        **os.environ,
        "FA2_CUTE_CACHE": os.path.join(folder, "kernels"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": os.path.join(folder, "fa4"),
    }
    command = [sys.executable, "-m", "fa2_cute.bench.first_call", json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    printed = (done.stdout.splitlines() or [""])[-1]
    try:
        return json.loads(printed)
    except ValueError:
        raise subprocess.SubprocessError(f"printed {printed[:80]!r}, not times") from None
