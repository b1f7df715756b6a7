"""The shape of a program: which numbers are legal, and what a look-up refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from scaler_triton.kernels.launch_config import CANDIDATES, DEFAULT, LaunchConfig, check_pass

pytestmark = pytest.mark.host_only

ROOT = Path(__file__).parents[2]
LARGEST = {"num_warps": 32, "vectors": 8, "unroll": 16}


@pytest.mark.parametrize("field", LARGEST)
@pytest.mark.parametrize("value", [0, -1, 64, 2**70, True, 1.0, "8", None])
def test_a_wrong_number_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be an int from 1 to {LARGEST[field]}, got"):
        LaunchConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("num_warps", 3), ("num_warps", 24), ("vectors", 6)])
def test_blocks_are_powers_of_two(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a power of two, got {value}"):
        LaunchConfig(**{field: value})


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_the_extremes_are_legal(itemsize):
    assert LaunchConfig(1, 1, 1).chunk_elements(itemsize) == 32 * 16 // itemsize
    assert LaunchConfig(**LARGEST).chunk_elements(itemsize) == 32 * 32 * 8 * 16 * 16 // itemsize
    LaunchConfig(unroll=3)


def test_the_default_is_a_candidate_and_no_candidate_comes_twice():
    assert DEFAULT in CANDIDATES
    assert len(set(CANDIDATES)) == len(CANDIDATES)


@pytest.mark.parametrize(("mode", "itemsize", "named"), [("write", 2, "mode"), ("check", 1, "itemsize")])
def test_an_unknown_pass_is_named(mode, itemsize, named):
    with pytest.raises(ValueError, match=f"{named} must be one of"):
        check_pass(mode, itemsize)


def test_a_lookup_loads_no_triton():
    program = (
        "import sys, torch; from scaler_triton.kernels.lookup import config_for\n"
        "config_for(torch.device('cpu'), 'check', 2)\n"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
