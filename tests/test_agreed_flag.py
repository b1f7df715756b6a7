"""A verdict knows whether the flags it served are still its own."""

from __future__ import annotations

import torch

from scaler_triton.verdict import Verdict

CPU = torch.device("cpu")


def test_flags_are_its_own_until_somebody_writes() -> None:
    verdict = Verdict(CPU)
    flags = verdict.serve([CPU])
    assert verdict.is_behind(flags)
    assert not verdict.is_behind(dict(flags))
    flags[CPU].fill_(1.0)
    assert not verdict.is_behind(flags)


def test_a_flag_replaced_or_added_is_noticed() -> None:
    for key in (CPU, torch.device("meta")):
        verdict = Verdict(CPU)
        flags = verdict.serve([CPU])
        flags[key] = torch.zeros(())
        assert not verdict.is_behind(flags)


def test_skipping_raises_nothing_and_failing_does() -> None:
    verdict = Verdict(CPU)
    assert verdict.on_host() is False
    verdict = Verdict(CPU)
    verdict.skip()
    assert verdict.on_host() is True
    assert verdict.found_inf.item() == 1.0
