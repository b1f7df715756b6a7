"""All mutants: wrong versions of the code, one line each, and the tests that must notice."""

from __future__ import annotations

import of_clipping
import of_gpu
import of_kernels
import of_others
import of_ranks
import of_scaler

_MODULES = (of_scaler, of_ranks, of_clipping, of_kernels, of_gpu, of_others)
MUTANTS = [mutant for module in _MODULES for mutant in module.MUTANTS]
