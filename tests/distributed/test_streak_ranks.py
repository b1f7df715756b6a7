"""Whoever overflowed, the limit of skips is reached on every rank at the same update, and all count the same."""

import pytest
import streak_cases
from cases import Fault
from scaler_triton.stats import Lagging

pytestmark = pytest.mark.distributed

BAD_STEPS = [1, 3, 4, 5, 6]
STEPS, LIMIT = 12, 2


@pytest.mark.parametrize(("kind", "layout"), [("sharded", "plain"), ("grad", "dtensor"), ("world", "plain")])
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_one_ranks_overflows_raise_everywhere_at_once(two, kind, layout, name):
    faults = [Fault(step, step % 2) for step in BAD_STEPS]  # now one rank, now the other
    first, second = two.run(streak_cases.streak, kind, layout, name, faults, STEPS, LIMIT)
    assert first.stats == second.stats
    assert first.skipped == second.skipped
    texts = [dict(zip(rank.raised, map(str.splitlines, rank.raised.values()), strict=True)) for rank in (first, second)]
    assert {step: lines[0] for step, lines in texts[0].items()} == {step: lines[0] for step, lines in texts[1].items()}
    for lines in texts[0].values():  # the last skip was rank 0's, and each rank tells what it held
        assert lines[1] == "The last skip, at update 7: 1 bad gradient on rank 0, the only one asked."
    for lines in texts[1].values():
        assert lines[1:] == ["The last skip, at update 7: nothing known on this rank; ask with gather=True."]
    assert first.skipped == [step in BAD_STEPS for step in range(STEPS)]
    assert list(first.raised) == [step + Lagging.LAG for step in (5, 6)]
    assert (first.stats.updates, first.stats.skipped, first.stats.last_skip) == (STEPS, len(BAD_STEPS), 7)
    assert first.stats.backoffs == len(BAD_STEPS) - 1  # hysteresis forgives one
