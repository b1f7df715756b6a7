"""Mutants of the kernels and of what launches and measures them."""

from __future__ import annotations

from mutant import CLIPS, KERNELS, LAUNCHES, POLICY, REPORT, SIMULATED, TABLE, UPDATE, Mutant

MUTANTS = [
    Mutant("kernels/clip.py", "(ratio - 1.0)", "(ratio.to(tl.float32) - 1.0)", CLIPS),
    Mutant("kernels/clip.py", "tl.where(bad | (coef > 1.0), 1.0, coef)", "tl.where(coef > 1.0, 1.0, coef)", CLIPS),
    Mutant(
        "kernels/clip.py",
        "tl.div_rn(1.0, norm + 1e-6) * max_norm.to(tl.float32)",
        "tl.div_rn(max_norm.to(tl.float32), norm + 1e-6)",
        CLIPS,
    ),
    Mutant("kernels/clip.py", "tl.debug_barrier()", "pass", SIMULATED),
    Mutant("kernels/clip.py", "div_rn(tl.load(scale_ptr), coef)", "div_rn(1.0, coef) * tl.load(scale_ptr)", CLIPS),
    Mutant("kernels/common.py", "acc += x * 0.0", "acc += x * inv * 0.0", KERNELS),
    Mutant("kernels/common.py", "if has_edges:\n            bad +=", "if False:\n            bad +=", KERNELS),
    Mutant("kernels/common.py", "if address != 0:", "if True:", KERNELS),
    Mutant("kernels/common.py", "return nan * SAW_NAN | inf * SAW_INF", "return nan * SAW_NAN", KERNELS),
    Mutant(
        "kernels/common.py", "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = bits >> 16", KERNELS
    ),
    Mutant("kernels/common.py", 'tl.atomic_max(place, generation << KIND_BITS, sem="relaxed")', "pass", REPORT),
    Mutant("kernels/common.py", "+ (generation & (GENERATIONS - 1))", "", REPORT),
    Mutant("kernels/common.py", "tl.debug_barrier()", "pass", SIMULATED),
    Mutant("kernels/common.py", "if bad != bad:", "if True:", SIMULATED),
    Mutant("kernels/common.py", "has_edges = (start == 0) & (tail", "has_edges = (tail", KERNELS),
    Mutant(
        "kernels/common.py",
        "tl.minimum((aligned - address) // ITEMSIZE, n_elements)",
        "(aligned - address) // ITEMSIZE",
        KERNELS,
    ),
    Mutant("kernels/launcher.py", "if not self._compiled or _hooked():", "if not self._compiled:", LAUNCHES),
    Mutant(
        "kernels/launcher.py",
        "            self._compiled = ()\n            self._kernel",
        "            self._kernel",
        LAUNCHES,
    ),
    Mutant("kernels/launcher.py", "elif self._current_device() == self._device.index:", "elif True:", LAUNCHES),
    Mutant("kernels/launcher.py", "with torch.get_device_module(device).device(device):", "if True:", TABLE),
    Mutant("kernels/norm.py", "1.0 / scale.to(tl.float64)", "(1.0 / scale).to(tl.float64)", CLIPS),
    Mutant(
        "kernels/norm.py",
        "tl.store(totals_ptr + FLAG, tl.load(found_inf_ptr)",
        "tl.store(totals_ptr + FLAG, (0.0 * n_partials)",
        CLIPS,
    ),
    Mutant(
        "kernels/norm.py", "total *= tl.load(weight_ptr + tensor)", "total *= 1.0", "tests/kernels/test_norm_kernel.py"
    ),
    Mutant("kernels/probe.py", '_expect(f"bits of', 'print(f"bits of', "tests/kernels/test_probe.py"),
    Mutant(
        "kernels/probe.py",
        "torch.stack([norm, factor])",
        "torch.stack([_floats(8.0), factor])",
        "tests/kernels/test_probe.py",
    ),
    Mutant("kernels/scratch.py", "self.reset(-1.0)", "self.reset(1.0)", "tests/kernels/test_sweep.py"),
    Mutant(
        "kernels/scratch.py",
        "        self.reset(3.0)\n        self.buffer[",
        "        self.buffer[",
        "tests/kernels/test_sweep.py",
    ),
    Mutant(
        "kernels/sweep.py",
        "min(times(each)) > 1 + MARGIN",
        "max(times(each)) > 1 + MARGIN",
        "tests/kernels/test_sweep.py",
    ),
    Mutant("kernels/table.py", "if addresses == self._last and", "if self._last and", TABLE),
    Mutant("kernels/table.py", "self.is_in_a_graph or (", "(", TABLE),
    Mutant("kernels/table.py", "buffer = self._spare.pop()", "buffer = self._spare[0]", TABLE),
    Mutant("kernels/table.py", " or (self._staging is not None and self._staging.is_capturing())", "", TABLE),
    Mutant("kernels/table.py", "launcher.refuse_first_in_capture(device)", "pass", TABLE),
    Mutant("kernels/unscale.py", "    if not INVERSE:", "    if INVERSE:", KERNELS),
    Mutant("kernels/update_scale.py", "due = successful >= tl.load", "due = successful == tl.load", UPDATE),
    Mutant("kernels/update_scale.py", "if strikes >= tl.load", "if strikes > tl.load", POLICY),
    Mutant("kernels/update_scale.py", "0, strikes)", "strikes, strikes)", POLICY),
    Mutant("kernels/update_scale.py", "tl.where(found != 0, streak + 1, 0)", "streak + 1", POLICY),
    Mutant("kernels/update_scale.py", "tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)", "grown", UPDATE),
    Mutant("kernels/update_scale.py", "tl.minimum(successful, _MAX_TRACKER)", "successful", UPDATE),
    Mutant("kernels/update_scale.py", "_COLUMNS * row, nothing, mask=chosen)", "_COLUMNS * row, nothing)", POLICY),
    Mutant("kernels/update_scale.py", "tl.store(flags_ptr + _COLUMNS * row + 1, nothing, mask=chosen)", "pass", POLICY),
]
