"""The audit over ranks: it finds every split, and calls nothing one that is none."""

import re
from pathlib import Path

import audit_cases
import pytest
from audit_cases import PLACEMENTS
from cases import Fault

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
NOBODY = -1
GATHERS = 1


def agreed_on(answers):
    """The ranks got the same report, for one gather each, and the first one printed it: return it."""
    assert len({answer.text for answer in answers}) == 1
    assert [answer.printed for answer in answers] == [answers[0].text + "\n"] + [""] * (len(answers) - 1)
    assert [answer.collectives for answer in answers] == [GATHERS] * len(answers)
    return answers[0]


def row(answer, rank):
    """A rank's cells."""
    return next(line.split() for line in answer.text.splitlines()[4:] if line.split()[:1] == [str(rank)])


def test_torchs_scaler_and_a_fused_optimizer_split(ranks):
    faults = [Fault(2, ranks.world_size - 1)]
    answer = agreed_on(ranks.run(audit_cases.trained, "torch", "fsdp1-full", "sharded", "adamw-fused", faults))
    others = "rank 0" if ranks.world_size == 2 else "ranks 0-2"
    last = f"rank {ranks.world_size - 1}"
    assert answer.verdict == "split"
    assert answer.differences == (
        f"scale: 32 on {others}; 8 on {last}",
        f"tracker: 0 on {others}; 1 on {last}",
        f"steps: 4 on {others}; 3 on {last}",
    )
    assert row(answer, 0) == ["0", "32", "0", "4"]
    assert row(answer, ranks.world_size - 1)[1:] == ["8", "1", "3"]
    assert answer.text.startswith(f"ShardedGradScaler of torch; AdamW, fused; {ranks.world_size} ranks\n")
    assert "Not compared: 6 FSDP1 shards" in answer.text


def test_the_pages_show_an_audit_as_it_is(four):
    answer = agreed_on(four.run(audit_cases.trained, "torch", "fsdp1-full", "sharded", "adamw-fused", [Fault(2, 1)]))
    for page in ("README.md", "docs/why-skipped.md"):
        assert f"\n{answer.text}\n```" in (ROOT / page).read_text()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-full", "fsdp1-full-flat", "fsdp1-no-shard", "fsdp2"])
def test_ours_agree(two, wrapper):
    faults = [Fault(2, 0), Fault(2, 1)] if wrapper in ("ddp", "fsdp1-no-shard") else [Fault(2, 1)]
    answer = agreed_on(two.run(audit_cases.trained, "ours", wrapper, "sharded", "adamw-fused", faults))
    assert answer.verdict == "agree"
    assert "AGREE: every rank holds the same scale, tracker, steps" in answer.text
    assert ("6 replicated parameters." in answer.text) == (wrapper in ("ddp", "fsdp1-no-shard"))


def test_hsdp_agrees_in_its_replicas(four):
    faults = [Fault(2, 1), Fault(2, 3)]
    answer = agreed_on(four.run(audit_cases.trained, "ours", "hsdp2", "grad", "adamw", faults))
    assert answer.verdict == "agree"
    assert "6 replicated parameters." in answer.text


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-no-shard", "fsdp1-no-shard-flat"])
@pytest.mark.parametrize("bad", [0, 1])
def test_one_flipped_bit_of_a_replica_is_a_split(two, wrapper, bad):
    answer = agreed_on(two.run(audit_cases.flipped_in, wrapper, bad))
    assert answer.verdict == "split"
    assert "replicated parameters: 1 of " in answer.differences[0]
    assert answer.differences[1].endswith(": rank 0 | rank 1")
    assert "differ" in row(answer, 0)


def test_the_rank_that_stands_alone_is_named(four):
    answer = agreed_on(four.run(audit_cases.flipped_in, "ddp", 2))
    assert answer.differences == (
        "replicated parameters: 1 of 6 differ: module.down.bias",
        "  module.down.bias: ranks 0-1, 3 | rank 2",
    )


def test_hsdp_compares_within_its_replicas_only(four):
    answer = agreed_on(four.run(audit_cases.flipped_in, "hsdp2", 3))
    assert answer.differences[1].endswith(": rank 1 | rank 3")
    assert [row(answer, rank)[-2:] for rank in range(4)] == [["6", "equal"], ["6", "differ"]] * 2


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat", "fsdp2"])
def test_shards_are_no_replicas(two, wrapper):
    answer = agreed_on(two.run(audit_cases.flipped_in, wrapper, 1))
    assert answer.verdict == "agree"
    assert "replicated" not in answer.text
    assert re.search(r"^Not compared: \d (FSDP1|DTensor) shards? \(", answer.text, re.MULTILINE)


def test_fsdp1_needs_its_model_to_tell_that_nothing_is_sharded(two):
    answer = agreed_on(two.run(audit_cases.flipped_in, "fsdp1-no-shard", 1, with_model=False, replicated=True))
    assert answer.verdict == "agree"
    assert "FSDP1 shards" in answer.text


@pytest.mark.parametrize("layout", PLACEMENTS)
@pytest.mark.parametrize("bad", [NOBODY, 0, 3])
def test_dtensors_are_compared_at_equal_coordinates(four, layout, bad):
    answer = agreed_on(four.run(audit_cases.flipped_mesh, layout, bad))
    wrong = bad != NOBODY and layout != "sharded"
    assert answer.verdict == ("split" if wrong else "agree")
    assert ("DTensor shard " in answer.text) == (layout == "sharded")
    if wrong:
        told = {
            "replicated": {0: "rank 0 | ranks 1-3", 3: "ranks 0-2 | rank 3"},
            "hsdp": {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"},
            "partial": {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"},
            "tp": {0: "rank 0 | rank 1", 3: "rank 2 | rank 3"},
        }
        assert answer.differences[-1].endswith(f": {told[layout][bad]}")


@pytest.mark.parametrize("bad", [NOBODY, 1])
def test_dtensors_on_some_ranks_are_compared_among_these(four, bad):
    answer = agreed_on(four.run(audit_cases.on_some_ranks, bad))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    assert [row(answer, rank)[-2:] for rank in (2, 3)] == [["1", "equal"]] * 2
    assert "\nNot compared: 1 DTensor (on a mesh without this rank)." in answer.text
    if bad != NOBODY:
        assert answer.differences[-1].endswith(": rank 0 | rank 1")


def test_dtensors_around_tensors_of_a_class_of_its_own_are_not_compared(four):
    kinds = "on meta, sparse, quantized, lazy, or of a class of its own"
    for text in four.run(audit_cases.around_a_wrapper):
        assert f"\nNot compared: 1 parameter ({kinds}: no bits to read)." in text
        assert "replicated" not in text


def test_plain_parameters_that_differ_are_no_split_until_it_is_said(two):
    unsaid = agreed_on(two.run(audit_cases.own_parameters, replicated=False))
    assert unsaid.verdict == "agree"
    assert "Plain parameters: 1 of 2 differ: group 0 parameter 0 (3,). Nothing says" in unsaid.text
    told = agreed_on(two.run(audit_cases.own_parameters, replicated=True))
    assert told.verdict == "split"
    assert "Plain" not in told.text


def test_without_ddps_word_equal_parameters_are_reported_too(two):
    answer = agreed_on(two.run(audit_cases.flipped_in, "ddp", NOBODY, with_model=False))
    assert "Plain parameters: 6 of 6 are equal" in answer.text


def test_a_replica_of_another_shape_differs(two):
    assert agreed_on(two.run(audit_cases.own_shapes)).verdict == "split"


def test_what_ddp_ignores_is_not_taken_for_a_replica(two):
    answer = agreed_on(two.run(audit_cases.ignored_by_ddp))
    assert answer.verdict == "agree"
    assert "5 replicated parameters." in answer.text
    assert "1 of 1 differ: module.norm.weight." in answer.text


@pytest.mark.parametrize("bad", [NOBODY, 3])
@pytest.mark.parametrize("listed", [True, False])
def test_ddp_of_some_ranks_is_compared_among_them(four, bad, listed):
    answer = agreed_on(four.run(audit_cases.ddp_of_pairs, bad, listed))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    if bad != NOBODY:
        assert answer.differences[-1] == "  module.weight: rank 1 | rank 3"


@pytest.mark.parametrize("bad", [NOBODY, 3])
def test_shards_that_ddp_made_parameters_are_compared_among_its_ranks(four, bad):
    answer = agreed_on(four.run(audit_cases.ddp_over_tensor_parallel, bad))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    if bad != NOBODY:
        assert answer.differences[1:] == ("  module.up.weight: rank 1 | rank 3",)


@pytest.mark.parametrize(("what", "text"), [("steps", "NotImplementedError: "), ("scaler", "TypeError: scaler must ")])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_is_a_row_for_all(two, bad, what, text):
    answer = agreed_on(two.run(audit_cases.a_rank_raises, bad, what))
    assert answer.verdict == "unknown"
    assert row(answer, bad)[1] == "error"
    assert f"\nrank {bad}: {text}" in answer.text
    assert "UNKNOWN" in answer.text


def test_a_scaler_that_is_off_on_one_rank_is_a_split(two):
    assert agreed_on(two.run(audit_cases.disabled_on, [1])).differences == (
        "scale: 8 (unused) on rank 0; disabled on rank 1",
    )
    assert agreed_on(two.run(audit_cases.disabled_on, [0, 1])).verdict == "agree"


def test_only_the_groups_ranks_take_part(four):
    *refused, first, second = four.run(audit_cases.in_group)
    assert all(isinstance(text, str) and "process_group must contain this rank" in text for text in refused)
    answer = agreed_on([first, second])
    assert answer.differences == ("scale: 4 on rank 2; 8 on rank 3",)


def test_each_optimizer_counts_for_itself(two):
    answer = agreed_on(two.run(audit_cases.lists_of, 3))
    assert answer.differences == ("steps of 1 (Adam): 1 on rank 0; 2 on rank 1",)
    assert row(answer, 0) == ["0", "8", "(unused)", "0", "1", "1", "-"]
    assert row(answer, 1) == ["1", "8", "(unused)", "0", "1", "2", "-"]
