"""What a mutant is: a wrong version of the code; and the tests that notice them, by what they are about."""

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
WRAPPERS, LENDING = "tests/test_wrappers.py", "tests/test_lending.py"
UNPLANNED = "tests/distributed/test_unplanned.py"
FAILURE, FAILED = "tests/test_after_failure.py", "tests/test_failed_steps.py"
DIFFERENCES = "tests/test_differences.py"
GRADIENTS = "tests/test_gradients.py"
PLAN = "tests/test_plan.py"
REFERENCE = "tests/test_reference.py"
DISPATCH, INVERSE = "tests/test_dispatch.py", "tests/test_inverse.py"
STEPS = "tests/test_steps.py"
RANKS = "tests/distributed/test_rank_local.py tests/distributed/test_failures.py"
MESHES = "tests/distributed/test_dtensor.py"
GROUPS = "tests/distributed/test_process_group.py"
KERNELS = "tests/kernels/test_unscale_kernel.py tests/kernels/test_nonfinite_kernel.py"
TABLE = "tests/kernels/test_grad_table.py tests/kernels/test_launcher.py"
UPDATE = "tests/kernels/test_update_scale_kernel.py"
POLICY = "tests/kernels/test_update_policy_kernel.py"
LAUNCHES = "tests/kernels/test_launch_paths.py"
UNSTEPPED, TOUCHED = "tests/test_unstepped.py tests/test_unstepped_renewed.py", "tests/test_what_others_touch.py"
CLIP = " ".join(f"tests/test_clipping{part}.py" for part in ("", "_deferred", "_arguments", "_launches"))
CLIPS = "tests/kernels/test_clip_kernel.py tests/kernels/test_norm_kernel.py"
CLIPPED = "tests/distributed/test_clipping_ranks.py"
CAPTURED = "tests/test_capture_state.py"
SIMULATED = "tests/kernels/test_simulated.py"
REPORTED = "tests/distributed/test_overflow_ranks.py"
AGREED = "tests/test_agreed_flag.py"
SPLIT = "tests/distributed/test_split_ranks.py"
REPORT = "tests/test_overflow_report.py"
AUDIT, AUDITED = "tests/auditing", "tests/distributed/test_audit_ranks.py"
MIGRATION, COMPILE, COMPILED = "tests/test_migration.py", "tests/test_compile.py", "tests/test_compile_ops.py"
ACCELERATE = "tests/frameworks/test_accelerate.py tests/frameworks/test_accelerate_skips.py"
ACCELERATED = "tests/frameworks/test_accelerate_ranks.py"
LIGHTNING, LIGHTNING_RANKS = "tests/frameworks/test_lightning_trainer.py", "tests/frameworks/test_lightning_ranks.py"
FABRIC, VERSIONS = "tests/frameworks/test_lightning_fabric.py", "tests/frameworks/test_tested_versions.py"
STATS, EXTRAS, NORMS = "tests/test_stats.py", "tests/test_policy_extras.py", "tests/test_norms.py"
TEXT = "tests/test_report_text.py"
COMPILED_FUZZ = "tests/fuzz/test_compiled_ops.py tests/test_compile_ops.py"
PATCH_THREADS = "tests/test_patching_threads.py"
PATCH, PATCHED = "tests/test_patching.py", "tests/distributed/test_patching_ranks.py"
PRETENDED = "tests/test_pretended_gpu.py"
