"""torch.distributed.checkpoint with another number of ranks: the scaler comes back to the bit, the run goes on."""

import checkpoint_cases
import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kind", "name", "stop"), [("sharded", "adamw-fused", 3), ("sharded", "sgd", 5), ("grad", "adamw-fused", 5)]
)
def test_from_four_ranks_to_two_and_back(four, two, tmp_path, kind, name, stop):
    assert_resumes(four, two, tmp_path, kind, name, stop)
    assert_resumes(two, four, tmp_path, kind, name, stop)


def assert_resumes(first, second, tmp_path, kind, name, stop):
    folder = str(tmp_path / f"{first.world_size}-{second.world_size}")
    until = first.run(checkpoint_cases.train, kind, name, range(stop), save=folder)
    after = second.run(checkpoint_cases.train, kind, name, range(stop, 9), load=folder)
    whole = second.run(checkpoint_cases.train, kind, name, range(9))
    left = [end for _, end in until]
    loaded = [start for start, _ in after]
    assert all(each == left[0] for each in [*left, *loaded])  # scaler, parameters, moments: on every rank of both
    assert left[0]["scaler"]["scaler_triton"]["counters"]["strikes"] == 1  # which hysteresis forgave
    assert left[0]["scaler"]["scale"] == (8.0 if stop == 3 else 16.0)
    assert all(end == whole[0][1] for _, end in [*after, *whole])
