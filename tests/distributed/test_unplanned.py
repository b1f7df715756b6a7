"""A rank that fails before it has looked at any gradient tells the others, who wait for its flag."""

import pytest
import unplanned_cases
from cases import INIT_SCALE
from unplanned_cases import OVERFLOWS, STEPS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["grad", "sharded"])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("where", unplanned_cases.WHERE)
@pytest.mark.parametrize("how", ["unscale_", "step", "at once", "largest"])
def test_running_out_of_memory_before_the_first_gradient_splits_nobody(two, kind, name, where, how):
    good, bad = two.run(unplanned_cases.unplanned, kind, name, where, how)
    assert bad.errors[0].startswith("OutOfMemoryError: out of memory")
    for course in (good, bad):
        assert course.stepped == [step not in (0, OVERFLOWS) for step in range(STEPS)]
        assert course.scale == INIT_SCALE / 4
        assert not any(course.errors[1:])
    if kind == "sharded":  # the ranks hold copies
        assert good.digests == bad.digests
