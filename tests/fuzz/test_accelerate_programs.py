"""Random programs of an Accelerator with our scaler, beside plain training in fp32 that skips what overflows."""

import copy
import math
import tempfile
from typing import Any

import pytest
import torch
from fuzz_profile import Chunk, chunks
from hypothesis import strategies as st
from jobs import SETTINGS
from test_accelerate import DECAY, forget, new_accelerator

from scaler_triton.integrations.accelerate import use_scaler_triton

INPUT = (3.0, 4.0)
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.25),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.25, fused=True),
}


class Plain:
    """What training should come to: exact gradients, no scaling, a step for each batch that does not overflow."""

    def __init__(self, name: str, micro_batches: int) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1, 2))
        self.optimizer = OPTIMIZERS[name.removesuffix("-fused")]([self.weight])
        self.first_rate, self.micro_batches = self.optimizer.param_groups[0]["lr"], micro_batches
        self.scale, self.tracker, self.steps = SETTINGS["init_scale"], 0, 0
        self.scaled = torch.zeros(1, 2)

    def backward(self, value: float) -> None:
        outer = torch.tensor(value * self.scale / self.micro_batches, dtype=torch.float16)  # as autocast has it
        self.scaled += (torch.tensor([INPUT], dtype=torch.float16) * outer).float()

    def step(self, clip: str | None, bound: float) -> tuple[bool, float]:
        """Return whether the step was skipped, and the norm before clipping."""
        gradient, self.scaled = self.scaled / self.scale, torch.zeros(1, 2)
        norm = gradient.norm().item()
        if not gradient.isfinite().all():
            self.scale, self.tracker = self.scale / 2, 0
            return True, norm
        if clip == "norm":
            gradient = gradient * min(1.0, bound / (norm + 1e-6))
        elif clip == "value":
            gradient = gradient.clamp(-bound, bound)
        self.weight.grad = gradient
        self.optimizer.param_groups[0]["lr"] = self.rate
        self.optimizer.step()
        self.steps, self.tracker = self.steps + 1, self.tracker + 1
        if self.tracker == SETTINGS["growth_interval"]:
            self.scale, self.tracker = self.scale * 2, 0
        return False, norm

    @property
    def rate(self) -> float:
        return float(self.first_rate * DECAY**self.steps)


MICRO_BATCHES = st.tuples(
    st.sampled_from([0.5, 1.0, -2.0, 1.0, math.inf, math.nan]),
    st.sampled_from([None, "norm", "norm", "value"]),
    st.sampled_from([0.5, 2.0, 1e9]),
    st.booleans(),  # whether zero_grad sets to None
    st.booleans(),  # whether somebody asks before the step if it was skipped
    st.sampled_from(["", "", "", "save", "load"]),  # where no gradient waits for more, which no checkpoint holds
)


def train(name: str, micro_batches: int, batches: list[Any], folder: str) -> None:
    """Train with an Accelerator; assert after each micro-batch that it does what plain training does, and says so."""
    plain, saved = Plain(name, micro_batches), None
    accelerator = new_accelerator(gradient_accumulation_steps=micro_batches)
    scaler = use_scaler_triton(accelerator)
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = OPTIMIZERS[name](layer.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: DECAY**n)
    layer, optimizer, scheduler = accelerator.prepare(layer, optimizer, scheduler)
    skipped = False
    for turn, (value, clip, bound, to_none, asks, then) in enumerate(batches, 1):
        with accelerator.accumulate(layer):
            accelerator.backward((layer(torch.tensor([INPUT])).float() * value).sum())
            plain.backward(value)
            ends, norm = accelerator.sync_gradients, None
            if ends and clip == "norm":
                norm = accelerator.clip_grad_norm_(layer.parameters(), bound).item()
            elif ends and clip == "value":
                accelerator.clip_grad_value_(layer.parameters(), bound)
            if asks:
                assert optimizer.step_was_skipped == skipped
            optimizer.step()
            if ends:
                skipped, exact = plain.step(clip, bound)
                assert optimizer.step_was_skipped == accelerator.optimizer_step_was_skipped == skipped
                assert norm is None or math.isclose(norm, exact, rel_tol=1e-6) or not math.isfinite(exact)
            scheduler.step()
            optimizer.zero_grad(set_to_none=to_none)
        assert math.isclose(scheduler.get_last_lr()[0], plain.rate, rel_tol=1e-9)
        if then == "save" and turn % micro_batches == 0:
            accelerator.save_state(folder)
            saved = copy.deepcopy(plain)
        elif then == "load" and turn % micro_batches == 0 and saved is not None:
            accelerator.load_state(folder)
            plain = copy.deepcopy(saved)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (plain.scale, plain.tracker)
        torch.testing.assert_close(layer.weight.detach(), plain.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", chunks(in_ci=15, share=0.02), ids=str)
def test_programs_of_an_accelerator(chunk: Chunk) -> None:
    def as_plain(name: str, micro_batches: int, batches: list[Any]) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                train(name, micro_batches, batches, folder)
        finally:
            forget()

    names, accumulated = st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from([1, 2, 4])
    chunk.run(as_plain, names, accumulated, st.lists(MICRO_BATCHES, max_size=20))
