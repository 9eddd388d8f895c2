"""Makes the helper modules beside the emulator tests importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
