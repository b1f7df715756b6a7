"""Differences 18 and 23 over ranks: steps after `update`, and batches after a step that did not return."""

import pytest
import unstepped_cases
from cases import INIT_SCALE, LEARNING_RATE, Fault

pytestmark = pytest.mark.distributed

LAYOUTS = pytest.mark.parametrize(("kind", "layout"), [("sharded", "plain"), ("grad", "dtensor")])
NAMES = pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
NOBODY = -1


def stepped(scale):
    return [1.0 - LEARNING_RATE * unstepped_cases.GRADIENT / scale] * 6


def skip_what_torch_refuses(layout, name):
    if layout == "dtensor" and name == "sgd-fused":
        pytest.skip("torch has no fused SGD on DTensors")


@LAYOUTS
@NAMES
@pytest.mark.parametrize("gradless", [NOBODY, 1])
def test_postponed_step_divides_once_on_every_rank(two, kind, layout, name, gradless):
    skip_what_torch_refuses(layout, name)
    outcomes = two.run(unstepped_cases.postponed_step, kind, layout, name, [], gradless)
    for rank, outcome in enumerate(outcomes):
        assert outcome.values == ([1.0] * 6 if rank == gradless else stepped(INIT_SCALE))
        assert outcome.collectives == 1
    assert len({outcome.scale for outcome in outcomes}) == 1


@LAYOUTS
@NAMES
def test_postponed_step_is_skipped_everywhere_for_one_ranks_overflow(two, kind, layout, name):
    skip_what_torch_refuses(layout, name)
    outcomes = two.run(unstepped_cases.postponed_step, kind, layout, name, [Fault(0, 1)], NOBODY)
    assert [outcome.values for outcome in outcomes] == [[1.0] * 6] * 2
    assert [outcome.collectives for outcome in outcomes] == [1, 1]


@LAYOUTS
@NAMES
def test_a_rank_that_never_has_gradients_does_not_repeat_an_old_overflow(two, kind, layout, name):
    skip_what_torch_refuses(layout, name)
    first, second = two.run(unstepped_cases.skipped_step, kind, layout, name, 1)
    assert first.values == stepped(INIT_SCALE / 2)
    assert second.values == [1.0] * 6
    assert first.collectives == second.collectives == 1


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("sparse_first", [False, True])
def test_after_a_clip_that_failed_on_one_rank_the_late_step_is_skipped_everywhere(two, sparse_first, norm_type):
    for outcome in two.run(unstepped_cases.failed_clip, sparse_first, norm_type):
        assert outcome == ([1.0] * 3, 0, INIT_SCALE / 4)  # two updates


@LAYOUTS
@NAMES
@pytest.mark.parametrize("gradless", [NOBODY, 0, 1])
def test_23_a_rank_whose_step_failed_joins_the_reduction_of_the_next_batch(two, kind, layout, name, gradless):
    skip_what_torch_refuses(layout, name)
    first, second = two.run(unstepped_cases.step_that_failed, kind, layout, name, gradless)
    step = LEARNING_RATE * unstepped_cases.GRADIENT / INIT_SCALE
    assert first.values == [1.0 if gradless == 0 else 1.0 - 2 * step] * 6
    assert second.values == [1.0 if gradless == 1 else 1.0 - step] * 6
    assert first[1:] == second[1:] == (1, INIT_SCALE)
