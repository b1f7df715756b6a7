"""`no_sync`: gradients of several backward passes, of which only the last is reduced."""

import accumulation_cases
import pytest
from checks import scale_model

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_no_sync(two, how):
    """One rank overflows in a pass that is not reduced by itself; ours does what torch's does, to the bit."""
    results = two.run(accumulation_cases.accumulates_without_sync, how)
    for theirs, ours in results:
        assert ours == theirs
        assert ours["scales"] == [float.fromhex(scale) for scale in scale_model([1])[0]]
        assert ours["digests"][1] == ours["digests"][0] != ours["digests"][2]
    (_, first), (_, second) = results
    assert (first["digests"] == second["digests"]) == (how == "ddp")  # whole parameters, or different shards
