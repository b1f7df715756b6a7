"""Mutants of the kernels and of what launches and measures them."""

from __future__ import annotations

from mutant import Mutant

UNIT = "tests/unit/kernels/test_"
UNSCALE, NORM, CLIP, UPDATE = (f"{UNIT}{name}.py" for name in ("unscale", "norm", "clip", "update_scale"))
TABLE, LAUNCH, CONFIG = (f"{UNIT}{name}.py" for name in ("table", "launch", "config"))
TUNE = "tests/unit/cli/test_tune.py"
PATHS, SIMULATED = "tests/nightly/test_launch_paths.py", "tests/nightly/test_simulated.py"

MUTANTS = [
    Mutant("kernels/clip.py", "(ratio - 1.0)", "(ratio.to(tl.float32) - 1.0)", CLIP),
    Mutant("kernels/clip.py", "tl.where(bad | (coef > 1.0), 1.0, coef)", "tl.where(coef > 1.0, 1.0, coef)", CLIP),
    Mutant("kernels/clip.py", "tl.div_rn(1.0, norm + 1e-6) * max_norm", "tl.div_rn(max_norm, norm + 1e-6)", CLIP),
    Mutant("kernels/clip.py", "tl.debug_barrier()", "pass", SIMULATED),
    Mutant("kernels/config.py", "(user_file(gpu), SHIPPED / file_name(gpu))", "(SHIPPED / file_name(gpu),)", CONFIG),
    Mutant("kernels/config.py", "sum(numels) * itemsize >=", "sum(numels) >=", CONFIG),
    Mutant("kernels/launch.py", "if compiled is None or hooked:", "if compiled is None:", PATHS),
    Mutant(
        "kernels/launch.py",
        "            self._compiled = None\n            self._dispatch",
        "            self._dispatch",
        PATHS,
    ),
    Mutant("kernels/launch.py", "if self._current_device() != self._index:", "if False:", PATHS),
    Mutant("kernels/launch.py", "with torch.get_device_module(device).device(device):", "if True:", LAUNCH),
    Mutant("kernels/norm.py", "1.0 / scale.to(tl.float64)", "(1.0 / scale).to(tl.float64)", NORM),
    Mutant("kernels/norm.py", "_OVERFLOWS, tl.load(found_inf_ptr)", "_OVERFLOWS, (0.0 * n_partials)", NORM),
    Mutant("kernels/norm.py", "total *= tl.load(weight_ptr + tensor)", "total *= 1.0", NORM),
    Mutant("kernels/table.py", "if addresses == self._last and", "if self._last and", TABLE),
    Mutant("kernels/table.py", "(staging.captured or staging.is_capturing())", "staging.is_capturing()", TABLE),
    Mutant("kernels/table.py", "(staging.captured or staging.is_capturing())", "staging.captured", TABLE),
    Mutant("kernels/table.py", "buffer = self._spare.pop()", "buffer = self._spare[0]", TABLE),
    Mutant("kernels/table.py", "        launch.refuse_first_in_capture(device)", "        pass", LAUNCH),
    Mutant("kernels/unscale.py", "acc += x * 0.0", "acc += x * inv * 0.0", UNSCALE),
    Mutant("kernels/unscale.py", "            bad += tl.sum(edge * 0.0)", "            pass", UNSCALE),
    Mutant("kernels/unscale.py", "if address != 0:", "if True:", UNSCALE),
    Mutant("kernels/unscale.py", "return nan * NAN | inf * INF", "return nan * NAN", UNSCALE),
    Mutant(
        "kernels/unscale.py", "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = bits >> 16", UNSCALE
    ),
    Mutant("kernels/unscale.py", 'tl.atomic_max(place, generation << KIND_BITS, sem="relaxed")', "pass", UNSCALE),
    Mutant("kernels/unscale.py", "+ (generation & (GENERATIONS - 1))", "", UNSCALE),
    Mutant("kernels/unscale.py", "tl.debug_barrier()", "pass", SIMULATED),
    Mutant("kernels/unscale.py", "if bad != bad:", "if True:", SIMULATED),
    Mutant("kernels/unscale.py", "(start == 0) & (tail", "(tail", UNSCALE),
    Mutant("kernels/unscale.py", "        if not keeps_kinds:", "        if False:", UNSCALE),
    Mutant("kernels/unscale.py", "// ITEMSIZE, n_elements)", "// ITEMSIZE, n_elements + 16)", UNSCALE),
    Mutant("kernels/unscale.py", "        if not INVERSE:", "        if INVERSE:", UNSCALE),
    Mutant("kernels/update_scale.py", "due = successful >= tl.load", "due = successful == tl.load", UPDATE),
    Mutant("kernels/update_scale.py", "if strikes >= tl.load", "if strikes > tl.load", UPDATE),
    Mutant("kernels/update_scale.py", "0, strikes)", "strikes, strikes)", UPDATE),
    Mutant("kernels/update_scale.py", "tl.where(found != 0, streak + 1, 0)", "streak + 1", UPDATE),
    Mutant("kernels/update_scale.py", "tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)", "grown", UPDATE),
    Mutant("kernels/update_scale.py", "tl.minimum(successful, _MAX_TRACKER)", "successful", UPDATE),
    Mutant("kernels/update_scale.py", "row + _FLAG, nothing, mask=chosen)", "row + _FLAG, nothing)", UPDATE),
    Mutant(
        "kernels/update_scale.py", "tl.store(flags_ptr + _STATUS * row + _FAILED, nothing, mask=chosen)", "pass", UPDATE
    ),
    Mutant("scaler_triton/cli/tune.py", "max(each.ms) < min(default.ms) and", "", TUNE),
]
