"""`patch_torch(strict=True)`: on FSDP1 a plain GradScaler is refused, before it has touched or sent anything."""

import cases
import patching_cases
import pytest

FSDP1 = "fsdp1-full-flat"  # so that every rank has a gradient to look at

pytestmark = pytest.mark.distributed

METHODS = pytest.mark.parametrize("method", ["unscale_", "step"])
NAMES = pytest.mark.parametrize("name", ["adamw", "adamw-fused"])


@METHODS
@NAMES
def test_strict_refuses_a_plain_scaler_naming_the_fix(two, name, method):
    for tried in two.run(patching_cases.first_use, FSDP1, "grad", name, method, strict=True):
        assert tried.attempt.error.startswith("RuntimeError: GradScaler cannot tell which ranks share")
        assert "ShardedGradScaler" in tried.attempt.error
        assert "process_group" in tried.attempt.error
        assert tried.attempt.stage == "READY"
        assert not tried.attempt.grads_changed
        assert not tried.attempt.params_changed
        assert tried.attempt.collectives == 0
        assert tried.warned == []


@METHODS
@NAMES
def test_otherwise_it_warns_at_the_line_that_called_the_scaler(two, name, method):
    for tried in two.run(patching_cases.first_use, FSDP1, "grad", name, method, strict=False):
        assert tried.attempt.error is None
        ((file, text),) = tried.warned
        assert "ShardedGradScaler" in text
        assert file == cases.__file__  # which counts collectives around the call


@pytest.mark.parametrize("kind", ["sharded", "world"])
def test_strict_takes_scalers_that_know_their_ranks(two, kind):
    for tried in two.run(patching_cases.first_use, FSDP1, kind, "adamw", "step", strict=True):
        assert (tried.attempt.error, tried.warned) == (None, [])
        assert tried.attempt.params_changed


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_strict_takes_a_plain_scaler_elsewhere(two, wrapper):
    for tried in two.run(patching_cases.first_use, wrapper, "grad", "adamw", "step", strict=True):
        assert (tried.attempt.error, tried.warned) == (None, [])
        assert tried.attempt.params_changed


def test_strict_refuses_also_what_was_warned_about_before(two):
    for first, second in two.run(patching_cases.strict_after_the_first_warning, FSDP1):
        assert first is None
        assert second.startswith("RuntimeError: GradScaler cannot tell")


@METHODS
def test_strict_refuses_also_where_a_rank_has_an_empty_shard(two, method):
    """That one has no gradient, but all refuse together: FSDP1 is told by the parameters."""
    results = two.run(patching_cases.an_empty_shard, method)
    assert [held for held, _ in results] == [1, 0]
    for _, tried in results:
        assert tried.error.startswith("RuntimeError: GradScaler cannot tell which ranks share")
        assert tried.collectives == 0
        assert tried.stage == "READY"
