"""What random programs on one process are made of: mostly what training meets, rarely what ends a step early."""

from typing import Any

import torch
from hypothesis import strategies as st
from specification import FP32_MAX, LARGEST_INT, SMALLEST
from worlds import DTYPES, OPTIMIZERS, SHAPES, VARIANTS, ClipSpec, GradientSpec, OptimizerSpec, ParameterSpec

INF, NAN = float("inf"), float("nan")

# Mostly what training meets; what ends a step early stays rare, so that programs get far.
FORM_NAMES = ["dense", "accumulate", "accumulate-inplace", "keep", "none"] * 2
FORM_NAMES += ["transposed", "channels-last", "gaps", "offset"] * 2 + ["sparse", "uncoalesced", "piled", "expanded"]
PLANTS = [None] * 12 + [INF, -INF, NAN]
GOOD_SCALES = [1.0, 3.0, 2.0**16, 0.1, 1e-3, 2.0**100, 2.0**127, 2.0**-120, FP32_MAX, SMALLEST]
BAD_SCALES = [0.0, -1.0, INF, NAN, 1e-46]

scales = st.sampled_from(GOOD_SCALES)
any_scales = st.sampled_from(GOOD_SCALES * 2 + BAD_SCALES)
growth_factors = st.sampled_from([2.0, 1.0, 1.1, 4.0, 1e30])
any_growth_factors = growth_factors | st.sampled_from([0.5, INF, NAN, -1.0])
backoff_factors = st.sampled_from([0.5, 1.0, 0.3, 1e-30])
any_backoff_factors = backoff_factors | st.sampled_from([0.0, 1.5, NAN, -1.0])
intervals = st.integers(1, 4)
trackers = st.integers(0, 6)
indices = st.integers(0, 2)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])
all_dtypes = st.sampled_from(DTYPES)
rarely = st.integers(0, 15).map(lambda number: number == 15)
turns = st.tuples(st.booleans(), st.booleans(), st.booleans(), rarely)

parameter_specs = st.builds(ParameterSpec, st.sampled_from(SHAPES), dtypes, rarely.map(lambda frozen: not frozen))


@st.composite
def optimizer_specs(draw: Any) -> OptimizerSpec:
    parameters = draw(st.lists(parameter_specs, min_size=1, max_size=4))
    if draw(st.integers(0, 7)) == 7:  # the scaler refuses its gradients, but for a fused optimizer
        parameters.append(ParameterSpec(draw(st.sampled_from(SHAPES)), torch.float16))
    name, variant = draw(st.sampled_from(list(OPTIMIZERS))), draw(st.sampled_from(list(VARIANTS)))
    return OptimizerSpec(name, variant, tuple(parameters))


gradient_specs = st.builds(
    GradientSpec,
    st.sampled_from(FORM_NAMES),
    st.integers(0, 20),
    st.sampled_from([1.0, 1e3, 1e-6, 1e30]),
    st.sampled_from(PLANTS),
)
backwards = st.lists(gradient_specs, min_size=1, max_size=6)
several_backwards = st.lists(backwards, min_size=1, max_size=3)
tensor_options = st.fixed_dictionaries(
    {"dtype": st.sampled_from([torch.float32, torch.float64]), "requires_grad": st.booleans()}
)
constructions = st.fixed_dictionaries(
    {
        "init_scale": scales,
        "growth_factor": st.sampled_from([2.0, 1.1, 4.0]),
        "backoff_factor": st.sampled_from([0.5, 0.3]),
        "growth_interval": intervals,
        "enabled": rarely.map(lambda disabled: not disabled),
    }
)
settings = st.one_of(
    st.tuples(st.just("growth_factor"), any_growth_factors),
    st.tuples(st.just("backoff_factor"), any_backoff_factors),
    st.tuples(st.just("growth_interval"), st.integers(-1, 5)),
)
state_dicts = st.fixed_dictionaries(
    {
        "scale": scales,
        "growth_factor": growth_factors,
        "backoff_factor": backoff_factors,
        "growth_interval": intervals,
        "_growth_tracker": trackers,
    }
)
DEFECTS = {"scale": 0.0, "growth_factor": 0.5, "backoff_factor": 1.5, "growth_interval": 0, "_growth_tracker": -1}


@st.composite
def checkpoints(draw: Any) -> dict[str, Any]:
    """Draw what `load_state_dict` is given: mostly legal, else without a field, with a wrong one, or empty."""
    state, name = draw(state_dicts), draw(st.sampled_from(list(DEFECTS)))
    lacking = {key: value for key, value in state.items() if key != name}
    return draw(st.sampled_from([state, state, state, lacking, {**state, name: DEFECTS[name]}, {}]))


clips = st.builds(
    ClipSpec,
    st.lists(indices, min_size=1, max_size=3).map(tuple),
    st.sampled_from([1.0, 1e-3, 0.0, 1e3, 1e30, INF]),
    st.sampled_from([2.0] * 6 + [2, INF, "inf", 1.0, 3, 0.5]),
    rarely,
    st.none() | st.none() | st.frozensets(st.integers(0, 5)),
    rarely,
)
limits = st.fixed_dictionaries(
    {
        "min_scale": st.sampled_from([SMALLEST, 2.0**-10, 4.0]),
        "max_scale": st.sampled_from([FP32_MAX, 2.0**20, 4.0]),
        "hysteresis": st.integers(1, 3),
        "max_consecutive_skips": st.none() | st.integers(0, 2),
    }
)
bounds = st.sampled_from([SMALLEST, 2.0**-10, 1.0, 4, 2.0**20, FP32_MAX]) | any_scales | st.sampled_from(["4", None])
changes_of_limits = st.fixed_dictionaries(
    {},
    optional={
        "min_scale": bounds,
        "max_scale": bounds,
        "hysteresis": st.integers(0, 4) | st.sampled_from([-1, LARGEST_INT + 1, 2.0, "2", None]),
        "max_consecutive_skips": st.none() | st.integers(0, 2) | st.sampled_from([-1, 1.0, "1"]),
    },
)
