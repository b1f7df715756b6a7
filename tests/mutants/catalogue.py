"""Wrong versions of the code, one line each, and the tests that must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change: in `path`, `old` becomes `new`; `tests` (pytest arguments) must fail then."""

    path: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r}"


CONTRACT = "tests/test_contract.py tests/test_agreed_flag.py"
FAILURE = "tests/test_after_failure.py"
DIFFERENCES = "tests/test_differences.py"
GRADIENTS = "tests/test_gradients.py"
PLAN = "tests/test_plan.py"
REFERENCE = "tests/test_reference.py"
DISPATCH = "tests/test_dispatch.py"
STEPS = "tests/test_steps.py"
RANKS = "tests/distributed/test_rank_local.py tests/distributed/test_failures.py"
MESHES = "tests/distributed/test_dtensor.py"
GROUPS = "tests/distributed/test_process_group.py"
KERNELS = "tests/kernels/test_unscale_kernel.py tests/kernels/test_nonfinite_kernel.py"
TABLE = "tests/kernels/test_grad_table.py tests/kernels/test_launcher.py"
UPDATE = "tests/kernels/test_update_scale_kernel.py"

_S = "scaler_triton/"
MUTANTS = [
    # the step
    Mutant(_S + "grad_scaler.py", "or (args and callable(args[0]))", "", DIFFERENCES),
    Mutant(_S + "grad_scaler.py", 'state["found_inf_per_device"] = {}  # checked', "pass  # checked", CONTRACT),
    Mutant(_S + "grad_scaler.py", "if optimizers.skip_would_corrupt(inner) and", "if False and", STEPS),
    Mutant(_S + "grad_scaler.py", "void=ready", "void=False", FAILURE),
    Mutant(_S + "grad_scaler.py", "update(stage=OptState.UNSCALED, void=ready)", "update(void=ready)", FAILURE),
    Mutant(_S + "grad_scaler.py", "if self._growth_tracker is None:", "if True:", CONTRACT),
    Mutant(_S + "grad_scaler.py", "if self._host_flag(optimizer_state):", "if False:", STEPS),
    Mutant(_S + "grad_scaler.py", "scale.fill_(self._checked_scale(new_scale))", "scale.fill_(new_scale)", DIFFERENCES),
    Mutant(_S + "grad_scaler.py", "clone.process_group = self.process_group", "pass", GROUPS),
    # unscaling and what happens when it fails
    Mutant(_S + "unscaling.py", 'state["written"] = False', "pass", FAILURE),
    Mutant(_S + "unscaling.py", 'state["written"] = True', "pass", FAILURE),
    Mutant(_S + "unscaling.py", "if written or agreement is not None:", "if agreement is not None:", FAILURE),
    Mutant(_S + "unscaling.py", 'states[("gone", id(state))] = state', "pass", CONTRACT),
    Mutant(_S + "unscaling.py", "if self._unscale_is_overridden() else None", "if False else None", CONTRACT),
    Mutant(_S + "unscaling.py", "if self._unscale_is_overridden():  # the", "if False:  # the", CONTRACT),
    Mutant(_S + "unscaling.py", "self._new_verdict(plan).fail(agreement)", "pass", RANKS),
    Mutant(_S + "unscaling.py", "self._lazy_init_scale_growth_tracker(self._new", "str(self._new", RANKS),
    Mutant(_S + "unscaling.py", "if flags or expected else []", "if flags else []", RANKS),
    Mutant(
        _S + "unscaling.py",
        "for pair in ops.choose_backends(gradients.bounds",
        "for pair in ops.choose_backends([]",
        MESHES,
    ),
    # the flag and who agrees on it
    Mutant(_S + "verdict.py", "agreement.maximum_(self._signals)", "pass", RANKS),
    Mutant(_S + "verdict.py", "flag is mine and version(flag) == seen", "flag is mine", CONTRACT),
    Mutant(_S + "verdict.py", "flag is mine and version(flag) == seen", "version(flag) == seen", CONTRACT),
    Mutant(_S + "verdict.py", "_FAILED] = 1.0, 0.0", "_FAILED] = 0.0, 0.0", FAILURE),
    Mutant(_S + "verdict.py", "if values[_FAILED]:", "if False:", RANKS),
    Mutant(_S + "collectives.py", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM", RANKS),
    Mutant(_S + "collectives.py", "if len(members) > 1 else None", "", GROUPS),
    Mutant(_S + "collectives.py", "len(meshes) == 1 and meshes[0].ndim == 1", "meshes[0].ndim == 1", MESHES),
    Mutant(_S + "collectives.py", "        if missing:", "        if False:", GROUPS),
    Mutant(_S + "collectives.py", "if len(ranks) > 1:", "if False:", GROUPS),
    # plans and batches
    Mutant(_S + "plan.py", "or gradient.stride() != form.stride", "", PLAN),
    Mutant(_S + "plan.py", "            self._place(forms)\n", "", PLAN),
    Mutant(_S + "plan.py", "all(mine is theirs for", "all(True for", PLAN),
    Mutant(_S + "plan.py", "if isinstance(reference, weakref.ref):", "if True:", CONTRACT),
    Mutant(_S + "batch.py", "if gradient.dtype is torch.float16 and not allow_fp16:", "if False:", GRADIENTS),
    Mutant(_S + "batch.py", "        check_overlap(sparse_values(gradient))", "        pass", GRADIENTS),
    Mutant(_S + "batch.py", "if size != 1 and stride != expected:", "if stride != expected:", REFERENCE),
    Mutant(_S + "batch.py", "gradient.float().coalesce().half()", "gradient", GRADIENTS),
    # the torch path, policy, dispatch, optimizers
    Mutant(_S + "reference.py", "growth_tracker.clamp_(max=", "growth_tracker.clamp(max=", DIFFERENCES),
    Mutant(_S + "reference.py", ".clamp_(min=MIN_SCALE)", "", DIFFERENCES),
    Mutant(_S + "reference.py", "if tensor.dtype is not torch.float16 and", "if True or", REFERENCE),
    Mutant(_S + "reference.py", "and _storage(left) == _storage(right)", "", REFERENCE),
    Mutant(_S + "policy.py", "if not 1.0 <= number < math.inf:", "if not 1.0 < number < math.inf:", DIFFERENCES),
    Mutant(_S + "policy.py", "if not 0.0 < number <= 1.0:", "if not 0.0 <= number <= 1.0:", DIFFERENCES),
    Mutant(_S + "policy.py", "if not MIN_SCALE <= number", "if not 0.0 < number", DIFFERENCES),
    Mutant(_S + "dispatch.py", "if device not in _warned:", "if True:", DISPATCH),
    Mutant(_S + "dispatch.py", 'if requested == "triton":', "if False:", DISPATCH),
    Mutant(_S + "optimizers.py", "optimizers[-1].grad_scale = own", "pass", FAILURE),
    Mutant(_S + "optimizers.py", "factors[0] * factors[1]", "factors[0]", CONTRACT),
    # kernels
    Mutant("kernels/common.py", "acc += x * 0.0", "acc += x * inv * 0.0", KERNELS),
    Mutant("kernels/common.py", "if has_edges:\n            bad +=", "if False:\n            bad +=", KERNELS),
    Mutant("kernels/common.py", "if address != 0:", "if True:", KERNELS),
    Mutant("kernels/common.py", "return nan * SAW_NAN | inf * SAW_INF", "return nan * SAW_NAN", KERNELS),
    Mutant(
        "kernels/common.py", "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = bits >> 16", KERNELS
    ),
    Mutant("kernels/unscale.py", "    if not INVERSE:", "    if INVERSE:", KERNELS),
    Mutant("kernels/table.py", "if addresses == self._last:", "if self._last:", TABLE),
    Mutant("kernels/update_scale.py", "if successful >= growth_interval:", "if successful == growth_interval:", UPDATE),
    Mutant(
        "kernels/update_scale.py",
        "    growth_factor: tl.float64,",
        "    growth_factor: tl.float32,",
        "tests/kernels/test_aot.py",
    ),
    Mutant("kernels/update_scale.py", "tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)", "grown", UPDATE),
    Mutant("kernels/update_scale.py", "tl.minimum(successful, _MAX_TRACKER)", "successful", UPDATE),
]
