"""How much is fuzzed, and from which seeds: the only place that reads SCALER_TRITON_FUZZ.

Unset, every test draws the same programs each time. `SCALER_TRITON_FUZZ=10000` draws that many new ones in chunks;
each chunk's seed is in its test's name, and `SCALER_TRITON_FUZZ_SEED=<first seed>` draws the same again, by the same
rules and version of hypothesis. A failing program is printed as code, with a line for `hypothesis.reproduce_failure`.
"""

import os
import random
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

try:
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants
except ImportError:  # older ones read no source
    providers = None

PROGRAMS = "SCALER_TRITON_FUZZ"
FIRST_SEED = "SCALER_TRITON_FUZZ_SEED"
CHUNK = 500  # hypothesis remembers every program of a run: many small runs stay fast
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the CPU has Triton's interpreter without a GPU"
)


class Chunk(NamedTuple):
    """Programs drawn from one seed."""

    seed: int
    programs: int

    def __str__(self) -> str:
        return f"{self.programs}-from-seed-{self.seed}"

    def run(self, test: Callable[..., None], *strategies: Any) -> None:
        """Run a test with as many draws."""
        seed(self.seed)(settings_for(self.programs)(given(*strategies)(test)))()


def cases(ways: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return a test's parameters for the chunks of each way, which is some parameters and what `chunks` takes.

    One with "triton" gets the mark that it needs on "cuda", or on the CPU.
    """
    made = []
    for *way, in_ci, share in ways:
        mark = () if "triton" not in way else pytest.mark.gpu if "cuda" in way else INTERPRETED
        made += [
            pytest.param(*way, each, marks=mark, id="-".join(map(str, [*way, each]))) for each in chunks(in_ci, share)
        ]
    return made


def chunks(in_ci: int, share: float = 1.0) -> list[Chunk]:
    """Return what one test runs: `in_ci` programs, or its share of those that SCALER_TRITON_FUZZ asks for."""
    asked = int(os.environ.get(PROGRAMS, 0))
    total = max(1, round(asked * share)) if asked else in_ci
    first = int(os.environ.get(FIRST_SEED, _RANDOM_SEED if asked else 0))
    return [Chunk(first + i, min(CHUNK, total - i * CHUNK)) for i in range(-(-total // CHUNK))]


_RANDOM_SEED = random.SystemRandom().randrange(10**6) * 1000


def settings_for(programs: int, steps: int = 25) -> settings:
    """Return hypothesis's settings for that many programs of at most `steps` steps."""
    return settings(
        max_examples=programs,
        stateful_step_count=steps,
        database=None,  # a seed says it all
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def _forget_sources() -> None:
    """Keep hypothesis from drawing ints that it finds in the source of imported modules of ours.

    The chance of a rule to be left out of a program may be such an int: what a seed draws would depend on which modules
    other tests, or earlier programs, have imported, and would change with the package that is tested.
    """
    if providers is not None:
        nothing = Constants()
        providers._get_local_constants = lambda: nothing


_forget_sources()
