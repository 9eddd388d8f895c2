"""``fa2-cute bench``: times of this library beside those of other attention libraries, in one run on one GPU.

    from pathlib import Path
    from fa2_cute.bench import results
    report = results.load(Path("bench/results/2026-12-01-nvidia-h200-forward.json"))

See docs/bench.md. Importing this loads nothing.
"""
