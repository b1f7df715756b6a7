"""`overflow_report(gather=True)` names the parameter and the rank whose shard of it was bad."""

import overflow_cases
import pytest
from cases import Fault

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_every_rank_is_told_which_parameter_on_which_rank(two, kind):
    faults = [Fault(0, 1, param=1), Fault(0, 0, param=0, value=float("nan"))]
    outcomes = two.run(overflow_cases.reported, kind, "line-shards", faults)
    whole = (
        "The last skip, at update 1: 2 bad gradients on ranks 0-1.\n"
        "rank  parameter  holds  numel\n"
        "----  ---------  -----  -----\n"
        "   0  first      NaN        6\n"
        "   1  second     Inf        6"
    )
    for local, gathered, collectives in outcomes:
        assert gathered == whole
        assert collectives == 1
        assert "1 bad gradient on rank" in local


def test_a_rank_with_good_gradients_says_so(two):
    first, second = two.run(overflow_cases.reported, "sharded", "line-shards", [Fault(0, 1)])
    assert first[0] == "The last skip, at update 1: nothing known on this rank; ask with gather=True."
    assert first[1] == second[1]


def test_the_others_are_told_of_a_rank_that_cannot_report(two):
    (local, whole), (_, raised) = two.run(overflow_cases.reported_before_the_update)
    assert local == "The last skip: nothing known on this rank; ask with gather=True."
    wrong = "model must be a module or what its named_parameters() gives, got DTensor for a name and a tensor"
    assert raised == wrong
    assert whole == f"The last skip: nothing known on any rank.\nNot told: rank 1 raised TypeError: {wrong}."


@pytest.mark.parametrize(("lengths", "collectives"), [((0, 5), 1), ((1 << 14, 0), 1), ((3, (1 << 14) + 1), 2)])
def test_what_ranks_tell_arrives_whole(two, lengths, collectives):
    whole = [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
    assert two.run(overflow_cases.told, lengths) == [(whole, collectives)] * 2


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_parameters_have_their_names_while_they_are_gathered(two, reshard):
    for name, seen in two.run(overflow_cases.named_while_gathered, reshard):
        assert name == "up.bias"
        assert seen.endswith("Not compared: 6 DTensor shards (no other rank of its mesh holds a copy).")


def test_a_gradient_that_is_yet_a_sum_is_told_for_itself(two):
    assert two.run(overflow_cases.partial_beside_plain) == [[("replicated", "Inf")], []]
