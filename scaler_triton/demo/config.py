"""What one run of the demo is: everything a rank needs to know, and the same on all of them."""

from dataclasses import dataclass, field

from scaler_triton.demo.model import ModelSize


@dataclass(frozen=True)
class DemoConfig:
    """One run.

    Args:
        scaler: "ours" or "torch".
        mode: "single", "ddp", "fsdp1" or "fsdp2".
        optimizer: "adamw", "adamw-fused" or "sgd".
        steps: training steps.
        ranks: processes, each with its own micro-batch.
        device_type: "cpu" or "cuda".
        size: the transformer's dimensions.
        batch_size: snippets of text in one rank's micro-batch.
        init_scale: the scale at the first step.
    """

    scaler: str
    mode: str
    optimizer: str
    steps: int
    ranks: int = 2
    device_type: str = "cpu"
    size: ModelSize = field(default_factory=ModelSize)
    batch_size: int = 8
    init_scale: float = 2.0**10

    @property
    def growth_interval(self) -> int:
        """Good steps before the scale doubles: few, so that a short run shows it."""
        return max(2, self.steps // 8)

    @property
    def bad_shards(self) -> dict[int, int]:
        """Which rank's shard gets an inf at which step."""
        steps = (self.steps // 5, self.steps // 2, self.steps * 4 // 5)
        return {step: (nth + 1) % self.ranks for nth, step in enumerate(steps)}
