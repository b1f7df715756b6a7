"""HF Trainer on two ranks with FSDP1, one of which overflows: both skip; a run of torch's scaler goes on with ours."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import trainer_rank_cases as ranks

pytestmark = pytest.mark.distributed


def test_all_ranks_skip_with_the_trainers_defaults(two, tmp_path):
    for report in two(ranks.train, tmp_path):
        assert report.overflows == (6, 2)
        assert report.state["scale"] == ranks.INIT_SCALE / 4
        assert report.rates == pytest.approx([5e-5 * (1 - n / 6) for n in (0, 1, 1, 2, 3, 3)])  # it waits, too


def test_a_run_with_torchs_scaler_goes_on_with_ours(two, tmp_path):
    options = ranks.AS_TORCHS | {"save_strategy": "steps", "save_steps": 3}
    begun = two(ranks.train, tmp_path, ours=False, **options)
    resumed = two(ranks.train, tmp_path, checkpoint=str(tmp_path / "checkpoint-3"), **options)
    for whole, end in zip(begun, resumed, strict=True):
        assert end.overflows == (3, 1)
        assert (end.state, end.rates, end.digests) == (whole.state, whole.rates, whole.digests)
