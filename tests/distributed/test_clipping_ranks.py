"""`clip_grad_norm_` over ranks: one norm of the whole model whatever its layout, one collective, all agree."""

import math
import types

import clipping_cases
import clipping_failure_cases
import pytest
from cases import INIT_SCALE, Fault
from clipping_cases import MAX_NORM
from scaler_triton.clipping import copies
from torch.distributed.tensor import Partial, Replicate, Shard

pytestmark = pytest.mark.distributed

# Into how many different pieces of 2 x 3 each parameter of a layout is cut; the others of the ranks hold copies.
PIECES = {
    "line-shards": [4, 4],
    "line-replicated-first": [1, 4],
    "line-dtypes": [4, 4, 4],
    "line-beside-plain": [4, 0.5],  # the plain one has 3 elements
    "plain-beside-line": [0.5, 4],
    "square-shards": [4, 4],
    "square-replicated-first": [1, 4],
    "square-half-replicated-first": [2, 4],
    "hsdp": [2, 2],
    "fsdp-then-tp": [2, 4],
    "two-slices": [2, 2],
    "expert-parallel": [4, 4],
}


def gradient(index):
    return 2.0 ** (-index - 3)


def norm_of(layout):
    return math.sqrt(sum(6 * pieces * gradient(index) ** 2 for index, pieces in enumerate(PIECES[layout])))


@pytest.mark.parametrize("kind", ["sharded", "grad"])
@pytest.mark.parametrize("layout", PIECES)
def test_every_layout_has_the_norm_of_the_whole(four, kind, layout):
    outcomes = four.run(clipping_cases.laid_out, kind, layout, "adamw", [])
    for outcome in outcomes:
        assert outcome.norms[0] == pytest.approx(norm_of(layout), rel=1e-6)
        assert outcome.collectives == [(1, 0)]
        for index, values in enumerate(outcome.values):
            coefficient = min(1.0, MAX_NORM / norm_of(layout))
            assert values == pytest.approx([gradient(index) * coefficient] * len(values), rel=1e-2)
    assert len({outcome.norms[0] for outcome in outcomes}) == 1


@pytest.mark.parametrize("layout", PIECES)
def test_random_gradients_have_the_norm_that_fp64_has(four, layout):
    outcomes = four.run(clipping_cases.laid_out_at_random, layout)
    squares = {piece: square for _, held in outcomes for piece, square in held.items()}
    assert len(squares) == sum(map(math.ceil, PIECES[layout]))
    assert [norm for norm, _ in outcomes] == pytest.approx([math.sqrt(sum(squares.values()))] * 4, rel=1e-6)


@pytest.mark.parametrize("layout", ["line-shards", "hsdp", "fsdp-then-tp", "line-beside-plain"])
@pytest.mark.parametrize("order", [1.0, 3.0, math.inf])
def test_other_norms_count_each_piece_once(four, order, layout):
    parts = [(6 * pieces, gradient(index)) for index, pieces in enumerate(PIECES[layout])]
    want = max(g for _, g in parts) if order == math.inf else sum(n * g**order for n, g in parts) ** (1 / order)
    for outcome in four.run(clipping_cases.laid_out, "grad", layout, "adamw", [], order=order):
        assert outcome.norms[0] == pytest.approx(want, rel=1e-6)
        assert outcome.collectives == [(2, 0)]  # the flag's, and the norm's


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("layout", ["line-shards", "hsdp", "fsdp-then-tp"])
def test_one_ranks_overflow_is_everybodys(four, layout, name, value):
    for outcome in four.run(clipping_cases.laid_out, "grad", layout, name, [Fault(0, 3, param=1, value=value)]):
        norm = outcome.norms[0]
        assert math.isnan(norm) if math.isnan(value) else norm == math.inf
        assert outcome.scale == INIT_SCALE / 2
        assert outcome.collectives == [(1, 0)]
        assert outcome.values[0] == [gradient(0)] * 6  # unscaled, not clipped


@pytest.mark.parametrize("order", [1.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 3])
def test_one_ranks_overflow_shows_in_other_norms_everywhere(four, rank, value, order):
    faults = [Fault(0, rank, param=1, value=value)]
    for outcome in four.run(clipping_cases.laid_out, "grad", "line-shards", "adamw", faults, order=order):
        assert str(outcome.norms[0]) == str(value)
        assert outcome.scale == INIT_SCALE / 2
        assert outcome.collectives == [(2, 0)]


def test_a_rank_without_gradients_takes_part(two):
    for outcome in two.run(clipping_cases.laid_out, "grad", "line-shards", "adamw", [], 1):
        assert outcome.norms[0] == pytest.approx(math.sqrt(6 * (gradient(0) ** 2 + gradient(1) ** 2)), rel=1e-6)
        assert outcome.collectives == [(1, 0)]


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("grad", "ddp"),
        ("sharded", "ddp"),
        ("sharded", "fsdp1-full"),
        ("sharded", "fsdp1-full-flat"),
        ("sharded", "fsdp1-no-shard"),
        ("grad", "fsdp2"),
        ("sharded", "fsdp2"),
    ],
)
@pytest.mark.parametrize(("name", "defer"), [("sgd", False), ("adamw-fused", True)])
def test_models_are_clipped_as_one_process_is(two, kind, wrapper, name, defer):
    alone = (kind, wrapper) == ("grad", "ddp")  # gradients are equal everywhere: nobody need be asked
    assert_as_one_process(two.run(clipping_cases.trained, kind, wrapper, name, defer), 0 if alone else 1)


@pytest.mark.parametrize(
    ("kind", "wrapper"), [("sharded", "fsdp1-hybrid"), ("grad", "hsdp2"), ("grad", "fsdp2-tp"), ("sharded", "fsdp2-tp")]
)
def test_models_on_two_meshes_are_clipped_as_one_process_is(four, kind, wrapper):
    assert_as_one_process(four.run(clipping_cases.trained, kind, wrapper, "sgd", False), 1)


def assert_as_one_process(outcomes, collectives):
    assert len({tuple(outcome.norms) for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome.norms == pytest.approx(outcome.expected, rel=1e-6)
        assert outcome.collectives == [(collectives, 0)] * 4
        assert outcome.distance <= 2e-5


@pytest.mark.parametrize("faults", [[], [Fault(0, 2, param=1)]], ids=["good", "bad"])
def test_two_optimizers_two_meshes_one_norm_one_collective(four, faults):
    for outcome in four.run(clipping_cases.several, "grad", faults):
        assert outcome.collectives == [(1, 0)]
        assert outcome.values == [[0.0, 0.0] if faults else [1.0, 1.0]]
        assert outcome.scale == (INIT_SCALE / 2 if faults else INIT_SCALE)


def test_partial_gradients_are_summed_first(two):
    for outcome in two.run(clipping_cases.partial, "grad"):
        assert outcome.values == [[3.0] * 6]
        assert outcome.norms[0] == pytest.approx(3.0 * math.sqrt(6))


@pytest.mark.parametrize("kind", ["sharded", "grad"])
@pytest.mark.parametrize("order", [2.0, 3.0])
@pytest.mark.parametrize("own", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_gradients_count_as_they_are_placed_not_as_their_parameter_is(two, kind, order, own):
    others = [Shard(0), own, Replicate(), Partial(), Shard(1)]
    norm = sum(each**order for each in range(24)) ** (1 / order)
    for outcome in two.run(clipping_cases.placed_otherwise, kind, own, others, order):
        assert outcome.norms == pytest.approx([norm] * len(others))
        assert outcome.values[0] == pytest.approx([each * MAX_NORM / norm for each in range(24)])


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_a_plain_gradient_counts_as_its_parameter_whatever_came_before(two, kind):
    for norms in two.run(clipping_cases.plain_beside_placed, kind):
        assert norms == pytest.approx([math.sqrt(6)] * 3)


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("how", ["at once", "after unscaling", "largest", "some parameters"])
def test_a_rank_that_fails_tells_the_others(two, how, optimizers):
    first, second = two.run(clipping_failure_cases.one_rank_fails, how, optimizers)
    assert second[0].startswith("RuntimeError: unsupported operation: more than one element")
    assert first[0] == ""
    assert first[1].startswith("RuntimeError: Another rank failed to check its gradients")
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("how", ["at once", "after unscaling", "largest", "some parameters"])
def test_a_rank_that_fails_takes_part_in_the_sums_of_others(two, how, scales):
    first, second = two.run(clipping_failure_cases.one_rank_fails_beside_a_sum, how, scales)
    assert second[0].startswith("RuntimeError: unsupported" if scales else "AssertionError: Attempted")
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("how", ["at once", "after unscaling", "largest", "some parameters"])
def test_a_rank_that_fails_where_nobody_must_agree_skips_what_the_others_skip(two, how, scales):
    first, second = two.run(clipping_failure_cases.one_rank_fails_where_nobody_must_agree, how, scales)
    assert second[0].startswith("RuntimeError: unsupported" if scales else "AssertionError: Attempted")
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("kind", ["sharded", "grad"])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("how", ["at once", "after unscaling", "largest", "some parameters"])
def test_a_rank_that_never_scaled_tells_the_others(two, kind, how, optimizers):
    first, second = two.run(clipping_failure_cases.one_rank_never_scaled, kind, how, optimizers)
    assert second[0].startswith("AssertionError: Attempted clip_grad_norm_ but _scale is None.")
    assert first[0] == ""
    assert first[1].startswith("RuntimeError: Another rank failed to check its gradients")
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_a_rank_that_never_scaled_waits_for_nobody_where_all_are_refused(two, kind):
    first, second = two.run(clipping_failure_cases.one_rank_never_scaled, kind, "deferred", 1)
    assert first[0].startswith("ValueError: defer=True needs optimizers that take grad_scale")
    assert second[0].startswith("AssertionError: Attempted clip_grad_norm_ but _scale is None.")
    assert first[1].startswith("RuntimeError: Another rank failed to check its gradients")
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("kind", ["sharded", "world"])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("how", ["at once", "after unscaling", "largest", "some parameters"])
def test_a_rank_without_memory_for_the_norm_tells_the_others(two, kind, how, optimizers):
    first, second = two.run(clipping_failure_cases.one_rank_has_no_memory, kind, how, optimizers)
    assert [first[0], second[0]] == ["", "MemoryError: no room"]
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_a_rank_that_fails_once_some_is_unscaled_joins_the_reductions_to_come(two, kind):
    first, second = two.run(clipping_failure_cases.one_rank_has_no_room_once_all_is_unscaled, kind)
    assert [first[0], second[0]] == ["", "MemoryError: no room"]
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_an_interrupt_asks_nothing_of_other_ranks(two, kind):
    assert two.run(clipping_failure_cases.interrupted_together, kind) == [(0, True)] * 2


def test_a_rank_that_cannot_defer_tells_the_others(two):
    first, second = two.run(clipping_failure_cases.one_rank_has_no_kernel, "sharded")
    assert [first[0], second[0]] == ["", "no kernel"]
    assert first[1:] == second[1:] == ["True", str(INIT_SCALE / 2)]


def test_fsdp1_over_tensor_parallel_counts_what_both_cut_once(four):
    for norms, expected, _ in four.run(clipping_cases.fsdp1_over_tensor_parallel, orig=True):
        assert norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_ddp_over_tensor_parallel_agrees_and_counts_what_was_cut_once(four, kind):
    for norms, expected, skipped in four.run(clipping_cases.ddp_over_tensor_parallel, kind):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert skipped


def test_an_fsdp1_without_that_record_is_taken_to_be_all_there_is():
    assert copies._shards_before_fsdp1(object()) == {}
    for handle in (None, types.SimpleNamespace(flat_param=object())):
        assert copies._shards_before_fsdp1(types.SimpleNamespace(_handle=handle)) == {}


def test_flat_parameters_of_fsdp1_over_tensor_parallel_are_refused(four):
    for _, _, text in four.run(clipping_cases.fsdp1_over_tensor_parallel, orig=False):
        assert text.startswith("model must be FullyShardedDataParallel with use_orig_params=True, got flat parameters")


def test_fsdp1_needs_its_model(two):
    for text in two.run(clipping_cases.fsdp1_without_model):
        assert text.startswith("model is needed: parameter 0 is FullyShardedDataParallel's")
    for text in two.run(clipping_cases.fsdp1_without_model, inner=True):
        assert text.startswith("model must be the FullyShardedDataParallel module or one around it, got Net in which")


@pytest.mark.parametrize("sharding", ["fsdp1-full", "fsdp1-no-shard"])
def test_a_plain_scaler_clips_no_shards_by_their_own_norms(two, sharding):
    told = two.run(clipping_cases.fsdp1_with_a_plain_scaler, sharding)
    if sharding == "fsdp1-no-shard":
        assert told[0] == told[1]
        assert told[0][0] == ""
        return
    for text, _ in told:
        assert text.startswith("process_group is needed: parameter 0 is FullyShardedDataParallel's, cut into 2 pieces")


@pytest.mark.parametrize("kind", ["sharded", "grad"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_disabled_scaler_clips_fsdp1_by_the_norm_of_the_whole(two, kind, norm_type):
    on = two.run(clipping_cases.fsdp1_and_no_scaling, "sharded", True, norm_type)
    off = two.run(clipping_cases.fsdp1_and_no_scaling, kind, False, norm_type)
    assert off[0][0] == off[1][0] == pytest.approx(on[0][0], rel=1e-6)
    for _, said in (*on, *off):
        assert said.startswith(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite")


@pytest.mark.parametrize("kind", ["sharded", "grad", "world"])
@pytest.mark.parametrize("layout", PIECES)
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_disabled_scaler_clips_every_layout_by_the_norm_of_the_whole(four, kind, layout, order):
    norm = norm_of(layout) if order == 2.0 else gradient(0)
    for outcome in four.run(clipping_cases.laid_out, kind, layout, "adamw", [], order=order, enabled=False):
        assert outcome.norms[0] == pytest.approx(norm, rel=1e-3)  # torch rounds fp16 gradients' norms to fp16
        for index, values in enumerate(outcome.values):
            assert values == pytest.approx([gradient(index) * min(1.0, MAX_NORM / norm)] * len(values), rel=1e-2)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_disabled_scalers_norm_is_whole_on_every_rank(two, size, order):
    numbers = range(1, size + 1)
    norm = math.hypot(*numbers) if order == 2.0 else max(numbers)
    assert two.run(clipping_cases.disabled_on_uneven_shards, size, order) == [("Tensor", pytest.approx(norm))] * 2


@pytest.mark.parametrize("kind", ["sharded", "world", "grad"])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_disabled_scalers_norm_is_that_of_the_ranks_that_agree(two, kind, order):
    on, off = (two.run(clipping_cases.stages, kind, enabled, order) for enabled in (True, False))
    assert off == pytest.approx(on, rel=1e-6)
    assert (off[0] == off[1]) == (kind != "grad")


def test_a_look_on_one_rank_overrules_nothing_that_was_clipped_together(two):
    for before, after in two.run(clipping_cases.one_rank_looks_again):
        assert after == before


def test_optimizers_clipped_together_keep_each_other_not_alive(two):
    assert two.run(clipping_cases.several_and_then_one) == [[False, False]] * 2


@pytest.mark.parametrize("order", [2.0, 1.0])
def test_an_error_keeps_no_gradient_alive(two, order):
    assert two.run(clipping_cases.kept_after_an_error, order) == [[False, False]] * 2
