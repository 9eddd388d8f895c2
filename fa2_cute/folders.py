"""Whether a folder can be written to: asked before the work whose results go there."""

import tempfile
from pathlib import Path


def require_writable(name: str, folder: Path):
    """Raises OSError unless ``folder`` takes files; it is made if need be, and stays.

    name: what the folder was given by. That the disk has space left, and that a file of some name can be replaced,
    shows only later.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"{name}: got {folder}, takes a folder that can be written to: {why}") from error
