"""Trouble on one rank, or on all: nothing hangs, nobody splits, and the next step is right."""

import re

import failure_cases
import pytest
from cases import DEVICE, STEPS, Fault
from checks import assert_agreed, scale_model
from failure_cases import BAD_STEP

pytestmark = pytest.mark.distributed

KINDS = pytest.mark.parametrize("kind", ["grad", "sharded"])
UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])
NAMES = pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
FLAW_ERRORS = {
    "expanded": "RuntimeError: unsupported operation: more than one element",
    "csr": "NotImplementedError: the gradient of parameter .* torch.sparse_csr",
    "complex": "NotImplementedError: the gradient of parameter .* torch.complex64",
}


def assert_skipped_once(reports):
    """Everybody skipped the bad step and no other, for one collective a step, whoever raised."""
    scales, trackers = scale_model([BAD_STEP])
    for report in reports:
        assert report.scales == scales
        assert report.trackers == trackers
        assert report.stepped == [(step != BAD_STEP,) for step in range(STEPS)]
        assert report.step_counts in ([[]], [[STEPS - 1.0]])  # SGD counts nothing
        assert report.collectives == [(1,)] * STEPS
        assert report.update_collectives == [0] * STEPS


def errors_of(report):
    """The errors of the bad step; there are none at any other."""
    assert all(error == (None,) for step, error in enumerate(report.errors) if step != BAD_STEP)
    return report.errors[BAD_STEP][0]


@KINDS
@UNSCALE
@NAMES
@pytest.mark.parametrize("flaw", FLAW_ERRORS)
def test_a_rank_alone_with_a_bad_gradient(two, kind, name, flaw, unscale):
    reports = two.run(failure_cases.lone_flaw, kind, name, flaw, unscale=unscale, bad_ranks=[1])
    assert_skipped_once(reports)
    assert_matches(FLAW_ERRORS[flaw], errors_of(reports[1]))
    if name == "adamw":
        assert_matches("RuntimeError: Another rank", errors_of(reports[0]))
    else:
        assert errors_of(reports[0]) is None


def assert_matches(pattern, text):
    """`text` is there and starts as the pattern says."""
    assert text is not None
    assert re.match(pattern, text), text


@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_a_bad_gradient_on_several_ranks(four, name):
    reports = four.run(failure_cases.lone_flaw, "sharded", name, "expanded", unscale=False, bad_ranks=[0, 3])
    assert_skipped_once(reports)
    for rank in (0, 3):
        assert_matches(FLAW_ERRORS["expanded"], errors_of(reports[rank]))


@KINDS
@NAMES
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_a_rank_that_never_scaled(ranks, kind, name, method):
    *peers, forgetful = ranks.run(failure_cases.never_scaled, kind, name, method)
    assert_matches(rf"AssertionError: Attempted {method} but _scale is None\.", forgetful.error)
    assert not forgetful.grads_changed
    for attempt in peers:
        assert not attempt.params_changed
        reads_the_flag = method == "step" and name == "adamw"
        assert (attempt.error is not None) == reads_the_flag
    assert {attempt.collectives for attempt in [*peers, forgetful]} == {1}


@KINDS
@NAMES
def test_a_rank_that_scales_too_late_keeps_up_with_the_others(ranks, kind, name):
    reports = ranks.run(failure_cases.scaled_too_late, kind, name)
    assert_agreed(reports, [0])
    assert "_scale is None" in reports[-1].errors[0][0]


@KINDS
@NAMES
def test_a_wrong_order_raises_before_any_collective(two, kind, name):
    already = "RuntimeError: unscale_() has already been called on this optimizer since the last update()."
    stepped = "RuntimeError: step() has already been called since the last update()."
    late = "RuntimeError: unscale_() is being called after step()."
    for attempts in two.run(failure_cases.wrong_order, kind, name):
        assert [attempt.error for attempt in attempts] == [None, already, None, stepped, late]
        assert [attempt.collectives for attempt in attempts] == [1, 0, 0, 0, 0]
        assert [attempt.grads_changed for attempt in attempts] == [True, False, False, False, False]
        assert [attempt.params_changed for attempt in attempts] == [False, False, True, False, False]


@KINDS
@UNSCALE
@NAMES
def test_a_reduction_that_raises_makes_the_step_skip(two, kind, name, unscale):
    for report, stage in two.run(failure_cases.broken_reduction, kind, name, unscale):
        assert errors_of(report) == "ConnectionError: link lost"
        assert stage == "UNSCALED"
        assert report.scales == scale_model([BAD_STEP])[0]
        assert report.stepped == [(step != BAD_STEP,) for step in range(STEPS)]
        assert report.collectives == [(int(step != BAD_STEP),) for step in range(STEPS)]


@KINDS
@NAMES
def test_an_optimizer_that_raises_on_one_rank_leaves_the_scales_equal(two, kind, name):
    reports = two.run(failure_cases.raising_optimizer, kind, name)
    assert [errors_of(report) for report in reports] == [None, "MemoryError: no room"]
    for report in reports:  # What was agreed stands: nothing overflowed, on any rank.
        assert report.scales == scale_model([])[0]
        assert report.trackers == scale_model([])[1]
        assert report.collectives == [(1,)] * STEPS


@KINDS
def test_a_plain_optimizer_that_raises_on_one_rank_can_be_retried_there(two, kind):
    reports = two.run(failure_cases.raising_optimizer, kind, "adamw")
    assert [report.stepped for report in reports] == [[(True,)] * STEPS] * 2
    assert [report.step_counts for report in reports] == [[[float(STEPS)]]] * 2
    assert reports[0].digests == reports[1].digests


@KINDS
@UNSCALE
@pytest.mark.parametrize("gradless", [(), (0,)], ids=["", "gradless0"])
def test_old_style_optimizers_ask_often_and_cost_one_collective(two, kind, unscale, gradless):
    case = failure_cases.old_style
    results = two.run(case, kind, [Fault(BAD_STEP, 1, -1)], unscale=unscale, gradless=gradless)
    for rank, (report, asked) in enumerate(results):
        assert report.scales == scale_model([BAD_STEP])[0]
        assert report.collectives == [(1,)] * STEPS
        groups = len(asked) // STEPS
        assert groups >= 3
        assert asked == [{DEVICE: float(step == BAD_STEP)} for step in range(STEPS) for _ in range(groups)]
        if rank not in gradless:
            assert report.stepped == [(step != BAD_STEP,) for step in range(STEPS)]


@KINDS
@UNSCALE
def test_an_old_style_optimizer_that_does_not_ask_on_one_rank_leaves_nobody_waiting(two, kind, unscale):
    reports = two.run(failure_cases.old_style_that_does_not_ask, kind, [Fault(BAD_STEP, 1)], unscale)
    for report in reports:
        assert report.scales == scale_model([BAD_STEP])[0]
        assert report.collectives == [(1,)] * STEPS
    assert reports[1].stepped == [(step != BAD_STEP,) for step in range(STEPS)]


@KINDS
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_old_style_optimizer_that_raises_on_one_rank_leaves_nobody_waiting(two, kind, when):
    """Asked or not, it takes part in one reduction; the same step again is skipped and makes none."""
    reports = two.run(failure_cases.raising_old_style, kind, when)
    assert [errors_of(report) for report in reports] == [None, "MemoryError: no room"]
    for report in reports:
        skipped = [BAD_STEP] if when == "before" else []
        assert report.scales == scale_model(skipped)[0]
        assert report.trackers == scale_model(skipped)[1]
        assert report.stepped == [(step not in skipped,) for step in range(STEPS)]
        assert report.collectives == [(1,)] * STEPS


@KINDS
@NAMES
@pytest.mark.parametrize("how", ["bad", "mended", "never scaled"])
def test_a_check_that_fails_on_one_rank_leaves_the_step_to_check_afresh(two, kind, name, how):
    for rank, (check, step, good) in enumerate(two.run(failure_cases.failed_check, kind, name, how)):
        assert (check.error is not None) == (rank == 1)
        assert (check.stage, check.grads_changed) == ("READY", False)
        assert step.params_changed == (how != "bad")
        assert (good.error, good.params_changed) == (None, True)
        assert [each.collectives for each in (check, step, good)] == [1, 1, 1]


@KINDS
@UNSCALE
@NAMES
def test_a_rank_that_cannot_bring_its_flags_together_tells_the_others(two, kind, name, unscale):
    reports = two.run(failure_cases.lost_flag, kind, name, unscale)
    assert_skipped_once(reports)
    assert errors_of(reports[1]) == "MemoryError: no room"


@NAMES
def test_another_order_takes_one_flag_for_another_as_with_torch(two, name):
    assert two.run(failure_cases.another_order, "sharded", name) == [([True, False], 4.0), ([False, True], 4.0)]
