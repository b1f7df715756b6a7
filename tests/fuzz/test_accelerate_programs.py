"""Random programs of an Accelerator with our scaler, beside plain training in fp32 that skips what overflows."""

from __future__ import annotations

import copy
import math
import tempfile

import pytest
import torch
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs

from scaler_triton.integrations.accelerate import use_scaler_triton

INPUT = (3.0, 4.0)
INIT_SCALE, GROWTH_INTERVAL = 8.0, 2
DECAY = 0.9375  # of the learning rate, in each step of the scheduler
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.25),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.25, fused=True),
}


def forget() -> None:
    """Let the next Accelerator of this process be its first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Plain:
    """What training should come to: exact gradients, no scaling, a step for each batch that does not overflow."""

    def __init__(self, name: str, micro_batches: int) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1, 2))
        self.optimizer = OPTIMIZERS[name.removesuffix("-fused")]([self.weight])
        self.first_rate = self.optimizer.param_groups[0]["lr"]
        self.micro_batches = micro_batches
        self.scale, self.tracker, self.steps = INIT_SCALE, 0, 0
        self.scaled = torch.zeros(1, 2)

    def backward(self, value: float) -> None:
        outer = torch.tensor(value * self.scale / self.micro_batches, dtype=torch.float16)
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
        if self.tracker == GROWTH_INTERVAL:
            self.scale, self.tracker = self.scale * 2, 0
        return False, norm

    @property
    def rate(self) -> float:
        return float(self.first_rate * DECAY**self.steps)


class Accelerated(RuleBasedStateMachine):
    """An Accelerator does what plain training does, and says so."""

    def __init__(self) -> None:
        super().__init__()
        forget()
        self.folder = tempfile.TemporaryDirectory()
        self.saved: Plain | None = None

    def teardown(self) -> None:
        forget()
        self.folder.cleanup()

    @initialize(name=st.sampled_from(sorted(OPTIMIZERS)), micro_batches=st.sampled_from([1, 2, 4]))
    def start(self, name: str, micro_batches: int) -> None:
        self.plain, self.turn = Plain(name, micro_batches), 0
        handlers = [GradScalerKwargs(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)]
        options = {"cpu": True, "mixed_precision": "fp16", "kwargs_handlers": handlers}
        self.accelerator = Accelerator(**options, gradient_accumulation_steps=micro_batches)
        self.scaler = use_scaler_triton(self.accelerator)
        layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        optimizer = OPTIMIZERS[name](layer.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: DECAY**n)
        self.layer, self.optimizer, self.scheduler = self.accelerator.prepare(layer, optimizer, scheduler)

    @rule(
        value=st.sampled_from([0.5, 1.0, -2.0, 1.0, math.inf, math.nan]),
        clip=st.sampled_from([None, "norm", "norm", "value"]),
        bound=st.sampled_from([0.5, 2.0, 1e9]),
        to_none=st.booleans(),
        asks=st.booleans(),
    )
    def micro_batch(self, value: float, clip: str | None, bound: float, to_none: bool, asks: bool) -> None:
        with self.accelerator.accumulate(self.layer):
            self.accelerator.backward((self.layer(torch.tensor([INPUT])).float() * value).sum())
            self.plain.backward(value)
            ends = self.accelerator.sync_gradients
            norm = self._clip(clip, bound) if ends else None
            if asks:
                _ = self.optimizer.step_was_skipped
            self.optimizer.step()
            if ends:
                self._compare(*self.plain.step(clip, bound), norm)
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=to_none)
        self.turn += 1
        assert math.isclose(self.scheduler.get_last_lr()[0], self.plain.rate, rel_tol=1e-9)

    def _clip(self, clip: str | None, bound: float) -> Tensor | None:
        if clip == "norm":
            norm: Tensor = self.accelerator.clip_grad_norm_(self.layer.parameters(), bound)
            return norm
        if clip == "value":
            self.accelerator.clip_grad_value_(self.layer.parameters(), bound)
        return None

    def _compare(self, skipped: bool, exact: float, norm: Tensor | None) -> None:
        assert self.optimizer.step_was_skipped == skipped
        assert self.accelerator.optimizer_step_was_skipped == skipped
        assert norm is None or math.isclose(norm.item(), exact, rel_tol=1e-6) or not math.isfinite(exact)
        assert (self.scaler.get_scale(), self.scaler._get_growth_tracker()) == (self.plain.scale, self.plain.tracker)
        self._compare_weights()

    def _compare_weights(self) -> None:
        torch.testing.assert_close(self.layer.weight.detach(), self.plain.weight.detach(), rtol=1e-5, atol=1e-6)

    def at_a_boundary(self) -> bool:
        """Whether no gradient waits for more, which no checkpoint holds."""
        return self.turn % self.plain.micro_batches == 0

    @precondition(at_a_boundary)
    @rule()
    def save(self) -> None:
        self.accelerator.save_state(self.folder.name)
        self.saved = copy.deepcopy(self.plain)

    @precondition(lambda self: self.saved is not None and self.at_a_boundary())
    @rule()
    def load(self) -> None:
        self.accelerator.load_state(self.folder.name)
        self.plain = copy.deepcopy(self.saved)
        assert self.scaler.get_scale() == self.plain.scale
        self._compare_weights()


@pytest.mark.parametrize("chunk", chunks(in_ci=15, share=0.02), ids=str)
def test_programs_of_an_accelerator(chunk: Chunk) -> None:
    run_state_machine_as_test(seed(chunk.seed)(Accelerated), settings=settings_for(chunk.programs, steps=20))
