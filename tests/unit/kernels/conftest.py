"""Where SCALER_TRITON_SIMULATE names a target, every launch runs as compiled for it, on the simulator."""

import sys
from pathlib import Path

import pytest
from kernel_cases import SIMULATED


@pytest.fixture(scope="session", autouse=SIMULATED is not None)
def simulated_kernels():
    sys.path.insert(0, str(Path(__file__).parents[2] / "nightly"))
    from simulated_launches import simulated

    with simulated(SIMULATED) as kernels:
        yield kernels
