"""The same training in one process and without any scaler class: what the ranks are measured by."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.parallel import whole_parameters
from scaler_triton.demo.trace import StepCounter, Trace
from scaler_triton.demo.workload import Workload, new_optimizer


def train_reference(config: DemoConfig, after_step: Callable[[], object] = lambda: None) -> Trace:
    """Take every rank's micro-batch in turn, average the gradients, and skip the steps that are to be skipped."""
    with one_thread():
        reference = Reference(config)
        for step in range(config.steps):
            reference.train_step(step)
            after_step()
    return reference.finish()


class Reference:
    """Mixed precision by hand, from torch's description of it rather than from anyone's scaler."""

    def __init__(self, config: DemoConfig) -> None:
        self.config = config
        self.workload = Workload(config, torch.device(config.device_type))
        self.model = self.workload.new_model()
        self.optimizer = new_optimizer(config.optimizer, self.model.parameters())
        self.counter = StepCounter(self.optimizer)
        self.scale = config.init_scale
        self.good_steps = 0
        self.trace = Trace(True, start=whole_parameters(self.model).numpy())

    def train_step(self, step: int) -> None:
        """Take one step over all micro-batches."""
        self.trace.scales.append(self.scale)
        self.trace.losses.append(self._accumulate(step))
        skip = step in self.config.bad_shards or not self._unscale()
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.trace.skipped.append(skip)
        self._update_scale(skip)

    def finish(self) -> Trace:
        """Return the trace, completed with what is true at the end."""
        self.trace.scales.append(self.scale)
        self.trace.step_counts = self.counter.counts()
        self.trace.end = whole_parameters(self.model).numpy()
        return self.trace

    def _accumulate(self, step: int) -> float:
        losses = [self.workload.loss(self.model, step, rank) for rank in range(self.config.ranks)]
        for loss in losses:
            (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        return sum(loss.item() for loss in losses) / len(losses)

    def _unscale(self) -> bool:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        for grad in grads:
            grad.div_(self.config.ranks).div_(self.scale)
        return all(bool(grad.isfinite().all()) for grad in grads)

    def _update_scale(self, skipped: bool) -> None:
        self.good_steps = 0 if skipped else self.good_steps + 1
        if skipped:
            self.scale *= 0.5
        elif self.good_steps == self.config.growth_interval:
            self.scale *= 2.0
            self.good_steps = 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Sum in the order of a rank, which has one thread too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
