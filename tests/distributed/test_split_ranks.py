"""Ranks whose scales have come apart are told, all of them, at the next step: the flag's reduction carries scales."""

import pytest
import split_cases
from cases import INIT_SCALE

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])
@pytest.mark.parametrize(("kind", "layout"), [("sharded", "line-shards"), ("grad", "line-shards"), ("grad", "hsdp")])
def test_different_scales_raise_on_every_rank(four, kind, layout, unscale):
    for said in four.run(split_cases.stepped_with_different_scales, kind, layout, unscale):
        assert said[0] == said[2] == ""
        assert said[1].startswith(f"The ranks hold different scales, from {INIT_SCALE} to 64.0: ")


def test_a_clip_compares_nothing_stale(two):
    assert two.run(split_cases.clipped_after_a_step) == [True, True]
