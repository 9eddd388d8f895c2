"""``python -m fa2_cute`` is the command ``fa2-cute``."""

from .cli import main

main()
