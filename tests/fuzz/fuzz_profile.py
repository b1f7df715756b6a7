"""How much is fuzzed, and from which seeds: the only place that reads SCALER_TRITON_FUZZ.

Unset, every test draws the same programs each time. `SCALER_TRITON_FUZZ=10000` draws that many new ones in chunks;
each chunk's seed is in its test's name, and `SCALER_TRITON_FUZZ_SEED=<first seed>` draws the same again, by the same
rules and version of hypothesis. A failing program is printed as code, with a line for `hypothesis.reproduce_failure`.
"""

import os
import random
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings

try:
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants
except ImportError:  # older ones read no source
    providers = None

PROGRAMS = "SCALER_TRITON_FUZZ"
FIRST_SEED = "SCALER_TRITON_FUZZ_SEED"
CHUNK = 500  # hypothesis remembers every program of a run: many small runs stay fast


class Chunk(NamedTuple):
    """Programs drawn from one seed."""

    seed: int
    programs: int

    def __str__(self) -> str:
        return f"{self.programs}-from-seed-{self.seed}"


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
