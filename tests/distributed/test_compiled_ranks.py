"""A whole step under FSDP2 compiled: every rank does what it does uncompiled, one rank's overflow is everybody's."""

import compile_rank_cases
import pytest
from cases import Fault

pytestmark = pytest.mark.distributed

INF = float("inf")
FAULTS = [Fault(1, 1), Fault(4, 0)]  # while compiling, and after


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_a_whole_step_compiled(two, kind):
    compiled = two.run(compile_rank_cases.whole_step, kind, "adamw-fused", FAULTS, compiled=True)
    assert compiled == two.run(compile_rank_cases.whole_step, kind, "adamw-fused", FAULTS, compiled=False)
    for steps in compiled:
        assert [scale for scale, *_ in steps] == [float(scale).hex() for scale in (8, 4, 4, 8, 4, 4)]


@pytest.mark.parametrize("compiled", [True, False])
def test_ops_take_this_ranks_shard(two, compiled):
    expected = [([3.0, 4.0], 0.0, 5.0), ([3.0, INF], 1.0, INF)]
    assert two.run(compile_rank_cases.ops_on_shards, compiled=compiled) == expected
