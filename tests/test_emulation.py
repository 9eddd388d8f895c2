"""How long emulation takes, as it is announced."""

import math

import pytest
import torch

from fa2_cute import cli, emulation, emulator, flash_attn_func

# (what, waves of RESIDENT_THREADS threads, key tiles of a block, seconds of one core); not first launches of a kernel.
MEASURED = (
    ("head_dim 64, full, 2 x 1024", 4, 16, 1.29),
    ("head_dim 64, full, 1 x 2048", 4, 32, 2.51),
    ("head_dim 64, causal, 1 x 4096", 8, 32, 5.12),
    ("head_dim 64, causal, 16 packed sequences of 512", 20.5, 4, 3.45),
    ("head_dim 64, causal, softcap, 1 x 2048", 8, 16, 2.37),
    ("head_dim 64, bool mask, 1 x 2048", 8, 32, 3.35),
    ("head_dim 96, full, 1 x 2048", 4, 64, 3.43),
    ("head_dim 128, full, 1 x 2048", 8, 64, 6.58),
    ("head_dim 128, causal, 1 x 4096", 16, 64, 12.98),
    ("head_dim 128, causal, 16 x 256", 32, 4, 4.47),
    ("head_dim 128, full, 64 x 64", 32, 2, 1.49),
    ("head_dim 256, 1024 queries on split keys", 8, 32, 5.59),
    ("head_dim 128, 16 single queries on 8192 keys", 20, 26, 11.50),
    ("head_dim 128, 256 queries on 8192 keys", 10, 52, 8.60),
    ("combining many splits", 32, 0, 0.27),
    ("combining few splits", 32, 0, 0.13),
)


@pytest.mark.parametrize(("what", "waves", "tiles", "seconds"), MEASURED)
def test_estimates_are_within_a_factor_of_two_of_what_was_measured(what, waves, tiles, seconds):
    estimate = emulation.estimated_seconds(int(waves * emulator.RESIDENT_THREADS), tiles)
    assert 0.5 <= seconds / estimate <= 2.0


def test_estimates_are_not_biased():
    """The geometric mean of the ratios; a wait is better announced too long than too short."""
    ratios = [
        seconds / emulation.estimated_seconds(int(waves * emulator.RESIDENT_THREADS), tiles)
        for _, waves, tiles, seconds in MEASURED
    ]
    assert 0.8 <= math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.0


@pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
def test_counting_is_announced_as_longer(monkeypatch, capsys):
    """A short call's time is not worth a line, but counted it is; the estimate of each launch is what is said."""
    q = torch.zeros(1, 70, 2, 64, dtype=torch.bfloat16)
    flash_attn_func(q, q, q + 0)  # that a kernel is compiled is said
    plain = emulation.estimated_seconds(2 * 128, 2)
    monkeypatch.setattr(emulation, "QUIET_SECONDS", 2 * plain)
    capsys.readouterr()
    flash_attn_func(q, q, q + 0)
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        cli.main(["trace", "1x70x2x64"])
    assert "emulating this call takes about" in capsys.readouterr().err
