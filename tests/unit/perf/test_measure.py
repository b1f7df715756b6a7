"""Turns: who has one, and after whom."""

from collections import Counter
from itertools import permutations

from perf.measure import Context


def test_in_each_round_all_have_a_turn_in_any_order() -> None:
    rounds = Counter(map(tuple, Context("cpu").rounds(["torch", "ours", "ours, update()"], 60.0)))
    assert {*rounds} == {*permutations(["torch", "ours", "ours, update()"])}
    assert rounds.total() == 600
    assert all(80 <= count <= 120 for count in rounds.values())
