"""Accelerate on two ranks: DDP, FSDP1 and FSDP2 train, clip, skip, accumulate and resume with our scaler."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_cases

SHARDINGS = ["ddp", "fsdp1", "fsdp1-flat", "fsdp2"]
OPTIMIZERS = ["adamw", "adamw-fused"]
FUSED = [("ddp", "adamw-fused"), ("fsdp2", "adamw-fused")]  # not FSDP1, where torch's scaler fails with one
STEPS, OVERFLOWS = 6, (1, 4)
SKIPPED = [False, True, False, False, True, False]

pytestmark = pytest.mark.distributed


def in_all(reports: list[Any], name: str) -> Any:
    """What all ranks say of something that they must agree on."""
    first, *others = (getattr(report, name) for report in reports)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_all_ranks_skip_and_say_so(two, sharding, name):
    reports = two(accelerate_cases.train, sharding, name, OVERFLOWS, STEPS)
    assert in_all(reports, "skipped") == SKIPPED
    assert [float.fromhex(scale) for scale in in_all(reports, "scales")] == [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]
    assert in_all(reports, "trackers") == [1, 0, 1, 0, 0, 1]
    assert in_all(reports, "step_counts") == [float(SKIPPED.count(False))]
    if sharding == "ddp":
        in_all(reports, "digests")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_scheduler_waits_with_the_optimizer(two, sharding, name):
    rates = in_all(two(accelerate_cases.train, sharding, name, OVERFLOWS, STEPS), "rates")
    before = [SKIPPED[:step].count(False) for step in range(STEPS)]
    # Accelerate steps a scheduler once a rank.
    assert rates == [pytest.approx(2.0**-4 * accelerate_cases.DECAY ** (2 * count), rel=1e-12) for count in before]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_clipping_is_the_scalers_in_one_reduction(two, sharding, name):
    reports = two(accelerate_cases.train, sharding, name, OVERFLOWS, STEPS)
    # None: all parameters, which takes one pass. Under DDP nobody else needs to be asked.
    assert in_all(reports, "clipped_by_scaler") == [None] * STEPS
    assert in_all(reports, "collectives") == [(0 if sharding == "ddp" else 1, 0)] * STEPS


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_model_is_wrapped_and_computes_in_fp16(two, sharding):
    model, parameter, dtype = two(accelerate_cases.prepared, sharding)[0]
    assert model == {"ddp": "DistributedDataParallel", "fsdp2": "FSDPNet"}.get(sharding, "FullyShardedDataParallel")
    assert parameter == ("DTensor" if sharding == "fsdp2" else "Parameter")
    assert dtype == "torch.float16"


@pytest.mark.parametrize(("sharding", "name"), [*((each, "adamw") for each in SHARDINGS), *FUSED])
def test_equals_torchs_scaler_to_the_bit(two, sharding, name):
    overflows = () if "fused" in name else OVERFLOWS  # after one Accelerate's own scheduler goes on, if it is fused
    ours, theirs = (
        two(accelerate_cases.train, sharding, name, overflows, STEPS, max_norm=1e9, ours=ours) for ours in (True, False)
    )
    for mine, other in zip(ours, theirs, strict=True):
        for what in ("scales", "trackers", "skipped", "rates", "digests", "step_counts"):
            assert getattr(mine, what) == getattr(other, what), what
        # The sum of squares is taken in fp64, torch's in fp32, shard by shard.
        assert mine.norms == pytest.approx(other.norms, rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_accumulates_as_with_torchs_scaler(two, sharding, name):
    """A fused optimizer as torch's scaler with a plain one: under FSDP1 torch's splits the ranks of a fused one."""
    overflows, steps = (5, 11), 12  # in micro-batches after which gradients are reduced
    options = {"max_norm": 1e9, "gradient_accumulation_steps": 3}
    ours = two(accelerate_cases.train, sharding, name, overflows, steps, **options)
    theirs = two(accelerate_cases.train, sharding, "adamw", overflows, steps, ours=False, **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.skipped == other.skipped == [False, True, False, True]
        assert mine.scales == other.scales
        assert mine.rates == other.rates
        assert mine.step_counts == other.step_counts
        assert mine.norms[0] == pytest.approx(other.norms[0], rel=1e-6)  # of gradients added up in three backwards
        assert mine.norms == pytest.approx(other.norms, rel=1e-3, nan_ok=True)  # each by the weights of the step before
        if name == "adamw":  # a fused one rounds in another order
            assert mine.digests == other.digests


@pytest.mark.parametrize("trained", [0, 3], ids=["fresh", "live"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_resumes_to_the_bit(two, tmp_path, sharding, name, trained):
    for run in two(accelerate_cases.resume, sharding, name, tmp_path, trained=trained):
        assert run.loaded == run.saved
        assert run.resumed.skipped == [False, True, False, False]
        # Accelerate loads no shards of FSDP1's into an optimizer without state, whatever the scaler.
        if trained or not sharding.startswith("fsdp1"):
            assert run.resumed == run.straight


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_states_of_fsdp1_resume_to_the_bit(two, tmp_path, name):
    """With FULL_STATE_DICT also an optimizer without state gets what was saved."""
    for run in two(accelerate_cases.resume_whole, name, tmp_path):
        assert run.loaded == run.saved
        assert run.resumed == run.straight


@pytest.mark.parametrize("sharding", ["ddp", "fsdp1-whole", "fsdp2"])
def test_a_run_with_torchs_scaler_goes_on_with_ours(two, tmp_path, sharding):
    """As if torch's had stayed, to the bit; with nothing clipped, as torch sums norms in fp32."""
    options = {"first_ours": False, "max_norm": 1e9}
    if sharding == "fsdp1-whole":
        runs = two(accelerate_cases.resume_whole, "adamw", tmp_path, **options)
    else:
        runs = two(accelerate_cases.resume, sharding, "adamw", tmp_path, trained=0, **options)
    for run in runs:
        assert run.loaded == run.saved
        for name in ("scales", "trackers", "skipped", "rates", "digests", "step_counts"):
            assert getattr(run.resumed, name) == getattr(run.straight, name), name


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_saving_before_the_first_step_leaves_the_scaler_alone(two, tmp_path, sharding):
    for before, after in two(accelerate_cases.save_before_the_first_step, sharding, "adamw", tmp_path):
        assert before == after


@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_saving_between_two_backwards_of_the_first_step_changes_nothing(two, tmp_path, sharding):
    saved, straight = (two(accelerate_cases.save_while_accumulating, sharding, each) for each in (tmp_path, None))
    assert saved == straight
    assert saved[0].skipped == [False, True, False]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_some_parameters_are_clipped_by_the_norm_of_all_their_shards(two, sharding):
    for norm, expected, collectives in two(accelerate_cases.clip_some, sharding):
        assert norm == pytest.approx(expected, rel=1e-6)  # summed by torch, in fp32
        assert collectives == (0 if sharding == "ddp" else 2)  # the flag's, then the norm's


def test_two_sharded_models_are_clipped_together_and_one_by_one(two):
    results = two(accelerate_cases.clip_two_models)
    assert results[0] == results[1]
    norms, collectives, skipped = results[0]
    assert norms[::2] == pytest.approx(norms[1::2], rel=1e-6)
    assert collectives == [1, 1, 1]
    assert skipped == [False, False]
