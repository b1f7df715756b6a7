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
WRAPPERS, LENDING = "tests/test_wrappers.py", "tests/test_lending.py"
UNPLANNED = "tests/distributed/test_unplanned.py"
FAILURE = "tests/test_after_failure.py"
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
UNSTEPPED, TOUCHED = "tests/test_unstepped.py", "tests/test_what_others_touch.py"
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
ACCELERATE, ACCELERATED = "tests/frameworks/test_accelerate.py", "tests/frameworks/test_accelerate_ranks.py"
LIGHTNING, LIGHTNING_RANKS = "tests/frameworks/test_lightning_trainer.py", "tests/frameworks/test_lightning_ranks.py"
FABRIC, VERSIONS = "tests/frameworks/test_lightning_fabric.py", "tests/frameworks/test_tested_versions.py"
STATS, EXTRAS, NORMS = "tests/test_stats.py", "tests/test_policy_extras.py", "tests/test_norms.py"
TEXT = "tests/test_report_text.py"
PATCH, PATCHED = "tests/test_patching.py", "tests/distributed/test_patching_ranks.py"

_S = "scaler_triton/"
MUTANTS = [
    # the step
    Mutant(_S + "grad_scaler.py", "or (args and callable(args[0]))", "", DIFFERENCES),
    Mutant(_S + "grad_scaler.py", 'state["found_inf_per_device"] = {}  # check again', "pass  # check again", RANKS),
    Mutant(_S + "grad_scaler.py", "if optimizers.skip_would_corrupt(inner) and", "if False and", STEPS),
    Mutant(_S + "grad_scaler.py", 'state["must_skip"] = factor is not None', 'state["must_skip"] = False', FAILURE),
    Mutant(_S + "grad_scaler.py", "self._enter_unscaled(state)  # the", "pass  # the", RANKS),
    Mutant(_S + "updating.py", "if self._growth_tracker is None:", "if True:", CONTRACT),
    Mutant(_S + "grad_scaler.py", "if self._host_flag(optimizer_state):", "if False:", STEPS),
    Mutant(_S + "updating.py", "new_scale = self._checked_scale(new_scale)\n", "pass\n", DIFFERENCES),
    Mutant(_S + "copying.py", "clone.process_group = self.process_group", "pass", GROUPS),
    # unscaling and what happens when it fails
    Mutant(_S + "unscaling.py", ' or state["verdict"].shared', "", CLIP),
    Mutant(_S + "unscaling.py", 'state["written"] = False', "pass", FAILURE),
    Mutant(_S + "unscaling.py", 'state["written"] = True', "pass", FAILURE),
    Mutant(_S + "agreeing.py", "if written or agreement is not None:", "if agreement is not None:", FAILURE),
    Mutant(_S + "states.py", 'states[("gone", id(state))] = state', "pass", CONTRACT),
    Mutant(
        _S + "unscaling.py",
        "return self._unscale_grads_(optimizer, inverse(scale), found_inf, self._allow_fp16)",
        "return self._unscale_batches_(plan, state, inverse(scale), found_inf, self._allow_fp16)",
        CONTRACT,
    ),
    Mutant(_S + "unscaling.py", "if self._unscale_is_overridden():  # it", "if False:  # the", CONTRACT),
    Mutant(_S + "agreeing.py", "report_failure(agreement, self._scale.device)", "pass", RANKS),
    Mutant(_S + "agreeing.py", "self._lazy_init_scale_growth_tracker(self._home", "str(self._home", RANKS),
    Mutant(_S + "unscaling.py", "if not flags and agreement is None and not self._is_sharded:", "if not flags:", RANKS),
    Mutant(_S + "unscaling.py", "for batch, backend in partials:", "for batch, backend in ():", MESHES),
    Mutant(_S + "unscaling.py", "plan.verdict = None  # the", "pass  # what", STEPS),
    Mutant(_S + "agreeing.py", "if stand_in.strict:", "if False:", PATCHED),
    Mutant(_S + "agreeing.py", "stacklevel=callers.stacklevel()", "stacklevel=2", PATCHED),
    Mutant(_S + "unscaling.py", "plan.marks.mark_on_host(batch, self._counters.read()[SKIPPED])", "pass", REPORT),
    Mutant(_S + "verdict.py", "if apart:", "if False:", SPLIT),
    Mutant(_S + "verdict.py", "= False\n        self._compare = None\n", "= False\n", AGREED),
    Mutant(_S + "scale_comparison.py", "excess > ranks * _ROUNDING", "excess > 0", AGREED),
    Mutant(_S + "clipping/at_once.py", "write_scales(totals[reference_norm.SCALES :], self._scale)", "pass", SPLIT),
    Mutant(_S + "clipping/at_once.py", "each.verdict.set_shared(totals[reference_norm.FLAG])", "pass", CLIP),
    Mutant(_S + "clipping/after_unscaling.py", "self._take_flag(part, flag)", "pass", CLIP),
    Mutant(_S + "clipping/after_unscaling.py", "first = first or error", "raise", CLIPPED),
    Mutant(_S + "clipping/copies.py", "if pieces > ranks:", "if False:", CLIPPED),
    Mutant(_S + "clipping/copies.py", "    if not plan.grad_shards:", "    if True:", CLIPPED),
    Mutant(_S + "clipping/rank_norms.py", " if placed else count", " if False else count", CLIPPED),
    Mutant(_S + "plan.py", "if shards != (", "if before is None and shards != (", CLIPPED),
    Mutant(_S + "clipping/disabled.py", "has_fsdp1(parameters)", "False", CLIPPED),
    Mutant(_S + "clipping/disabled.py", "dtensor_spec(parameter) is None", "True", CLIPPED),
    Mutant(_S + "placement.py", "getattr(tensor, DDP_SPEC, None)", "None", CLIPPED),
    Mutant(_S + "placement.py", "is not None or is_fsdp1(parameter)", "is not None", PATCHED),
    Mutant(_S + "agreeing.py", "(plan.is_distributed or self._is_sharded)", "self._is_sharded", MESHES),
    Mutant(_S + "agreeing.py", "(plan.is_distributed or self._is_sharded)", "plan.is_distributed", RANKS),
    Mutant(_S + "agreeing.py", "_is_sharded) and self.process_group is None:", "_is_sharded):", GROUPS),
    Mutant(
        _S + "clipping/reference_norm.py",
        "_quick_sum(tensors)",
        "_quick_sum(sorted(tensors, key=Tensor.data_ptr))",
        CLIP,
    ),
    Mutant(_S + "verdict.py", "            _check(self._compare, self._status.tolist())", "            pass", SPLIT),
    # what a report tells
    Mutant(_S + "plan_cache.py", "plan.take_marks(before)", "pass", REPORT),
    Mutant(_S + "overflow_marks.py", "in [*self._marked()]:", "in ():", REPORT),
    Mutant(_S + "plan.py", "group(partials.values(), partials)", "group(partials.values())", REPORTED),
    Mutant(_S + "settings.py", "plan.marks.forget()", "pass", REPORT),
    Mutant(_S + "overflow_marks.py", "self._unmarked.add(layout.key.device)", "pass", REPORT),
    Mutant(_S + "overflow_marks.py", "torch.where(flag != 0, both,", "torch.where(flag == flag, both,", REPORT),
    Mutant(
        _S + "overflow_marks.py", "(generation, left) if again == generation", "(left,) if again == generation", REPORT
    ),
    Mutant(_S + "updating.py", 'if state.get("unscaled_flag") is None:', "if True:", REPORT),
    # what a capture must not take for done
    Mutant(_S + "verdict.py", "if captured or not self.cleared:", "if not self.cleared:", CAPTURED),
    Mutant(_S + "updating.py", "not (captured or verdict in", "not (False or verdict in", CAPTURED),
    Mutant(_S + "batch_ops.py", '"unscale" if unscaled and dense is batch else None', "None", CAPTURED),
    Mutant(_S + "plan.py", "self._known.forget()", "pass", "tests/test_known_forms.py"),
    Mutant(_S + "left_unscaled.py", "self._entries.get(id(inner))", "self._entries.pop(id(inner), None)", UNSTEPPED),
    # what is left of a step after its update
    Mutant(_S + "left_unscaled.py", "self.gradient() is gradient and ", "", UNSTEPPED),
    Mutant(_S + "left_unscaled.py", "and self.versions == _versions(gradient)", "", UNSTEPPED),
    Mutant(
        _S + "left_unscaled.py",
        "and any(snapshots := snapshots_of(optimizer)):",
        "and (snapshots := snapshots_of(optimizer)) is not None:",
        UNSTEPPED,
    ),
    Mutant(_S + "updating.py", 'if state.get("must_skip") else flag', "if False else flag", UNSTEPPED),
    Mutant(_S + "updating.py", 'if "first_gradient" in state and', "if False and", UNSTEPPED),
    Mutant(
        _S + "updating.py",
        "self._plans.get(owner).marks.note_unstepped(self._counters.skips())",
        "pass",
        "tests/test_overflow_report.py",
    ),
    Mutant(
        _S + "left_unscaled.py",
        "first is not None and now is not None and first() is now()",
        "now is not None",
        UNSTEPPED,
    ),
    Mutant(_S + "clipping/after_unscaling.py", "self._enter_unscaled(part.state)", "pass", UNSTEPPED),
    # the flag and who agrees on it
    Mutant(_S + "verdict.py", "agreement.maximum_(self._status)", "pass", RANKS),
    Mutant(_S + "verdict.py", "*map(id, flags), *map(_version_of, flags)", "*map(id, flags)", CONTRACT),
    Mutant(_S + "verdict.py", "*map(id, flags), *map(_version_of, flags)", "*map(_version_of, flags)", CONTRACT),
    Mutant(_S + "states.py", "device: torch.ones((), ", "device: torch.zeros((), ", FAILURE),
    Mutant(
        _S + "unscaling.py",
        "self._fail(state, self._new_agreement",
        "(lambda *_: 0)(state, self._new_agreement",
        UNPLANNED,
    ),
    Mutant(_S + "verdict.py", "if values[_FAILED]:", "if False:", RANKS),
    Mutant(_S + "verdict.py", "if captured or not self.cleared:", "if captured:", CONTRACT),
    Mutant(
        _S + "flag_buffer.py",
        "weakref.finalize(verdict, self._free.append, row)",
        "weakref.finalize(verdict, str)",
        CONTRACT,
    ),
    Mutant(
        _S + "agreement.py",
        "self._reduce_(values, dist.ReduceOp.MAX)",
        "self._reduce_(values, dist.ReduceOp.SUM)",
        RANKS,
    ),
    Mutant(_S + "agreement.py", "for group in self.groups:", "for group in self.groups[:1]:", MESHES),
    Mutant(_S + "lending.py", "else product, found_inf.cpu()", "else product, found_inf", LENDING),
    Mutant(_S + "agreement.py", "if len(members) > 1 else None", "", GROUPS),
    Mutant(_S + "agreement.py", "len(meshes) == 1 and meshes[0].ndim == 1", "meshes[0].ndim == 1", MESHES),
    Mutant(_S + "agreement.py", "        if missing:", "        if False:", GROUPS),
    Mutant(_S + "agreement.py", "if not widest:", "if False:", GROUPS),
    Mutant(_S + "agreement.py", "if set().union(*ranks) <= set(_mesh_ranks(root))", "", MESHES),
    Mutant(_S + "agreeing.py", "theirs.ranks != mine.ranks", "False", MESHES),
    Mutant(_S + "clipping/disabled.py", "together = (sharded or", "together = (False or", CLIPPED),
    Mutant(_S + "lending.py", "elif not _only_reads(optimizers[-1]):", "elif False:", TOUCHED),
    Mutant(_S + "states.py", "elif (before := owner()) is None:", "elif (before := owner()) is not inner:", TOUCHED),
    Mutant(_S + "unscaling.py", "self._may_recheck(optimizer, state)", "False", TOUCHED),
    Mutant(_S + "unscaling.py", 'or "verdict" not in state or', "or", TOUCHED),
    Mutant(_S + "collectives.py", "if longest > _AT_ONCE:", "if len(data) > _AT_ONCE:", REPORTED),
    # plans and batches
    Mutant(_S + "plan.py", "or gradient.stride() != form.stride", "", PLAN),
    Mutant(_S + "plan.py", "            self._build_layouts(forms)\n", "", PLAN),
    Mutant(_S + "plan.py", "and all(map(is_, self.parameters, parameters))", "", PLAN),
    Mutant(_S + "plan_cache.py", "if isinstance(reference, weakref.ref):", "if True:", WRAPPERS),
    Mutant(_S + "plan.py", "_detached(gradient) for", "gradient for", GRADIENTS),
    Mutant(_S + "updating.py", "if not left and not self._left_unscaled:", "if not left:", UNSTEPPED),
    Mutant(_S + "plan.py", "(terms := placement.partial_terms(gradient)) > 1:", "(terms := 0):", MESHES),
    Mutant(_S + "known_forms.py", "(check is None or not check(gradient))", "(check is None)", PLAN),
    Mutant(
        _S + "known_forms.py",
        "and bool(gradients) and self._all(*gradients)",
        "and bool(gradients)",
        "tests/test_known_forms.py",
    ),
    Mutant(_S + "gradients.py", "        check_overlap(sparse_values(gradient))", "        pass", GRADIENTS),
    Mutant(_S + "batch.py", "if size != 1 and stride != expected:", "if stride != expected:", REFERENCE),
    Mutant(_S + "gradients.py", "gradient.float().coalesce().half()", "gradient", GRADIENTS),
    # the torch path, policy, dispatch, optimizers
    Mutant(_S + "reference.py", "if math.isfinite(tensor.sum().item()):", "if True:", REFERENCE),
    Mutant(_S + "reference_update.py", "< _ROUNDS_TO_INF", '< float("inf")', "tests/test_update_agrees.py"),
    Mutant(_S + "neighbours.py", "not np.array_equal(offsets, self._offsets)", "False", REFERENCE),
    Mutant(_S + "neighbours.py", "except RuntimeError:", "except KeyError:", REFERENCE),
    Mutant(_S + "policy.py", "if not 1.0 <= number < math.inf:", "if not 1.0 < number < math.inf:", DIFFERENCES),
    Mutant(_S + "policy.py", "if not 0.0 < number <= 1.0:", "if not 0.0 <= number <= 1.0:", DIFFERENCES),
    Mutant(_S + "policy.py", "if not MIN_SCALE <= number", "if not 0.0 < number", DIFFERENCES),
    Mutant(_S + "dispatch.py", "if device not in _warned:", "if True:", DISPATCH),
    Mutant(_S + "dispatch.py", 'if requested == "triton":', "if False:", DISPATCH),
    Mutant(
        _S + "dispatch.py", "os.register_at_fork(after_in_child=_renew_lock)", "pass", "tests/faults/test_processes.py"
    ),
    Mutant(_S + "lending.py", "optimizers[-1].grad_scale = own", "pass", FAILURE),
    Mutant(_S + "lending.py", "factors[0] * factors[1]", "factors[0]", LENDING),
    # kernels
    Mutant("kernels/common.py", "acc += x * 0.0", "acc += x * inv * 0.0", KERNELS),
    Mutant("kernels/common.py", "if has_edges:\n            bad +=", "if False:\n            bad +=", KERNELS),
    Mutant("kernels/common.py", "if address != 0:", "if True:", KERNELS),
    Mutant("kernels/common.py", "return nan * SAW_NAN | inf * SAW_INF", "return nan * SAW_NAN", KERNELS),
    Mutant(
        "kernels/common.py", "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = bits >> 16", KERNELS
    ),
    Mutant("kernels/unscale.py", "    if not INVERSE:", "    if INVERSE:", KERNELS),
    Mutant("kernels/table.py", "if addresses == self._last and", "if self._last and", TABLE),
    Mutant("kernels/table.py", "self.is_in_a_graph or (", "(", TABLE),
    Mutant("kernels/table.py", "buffer = self._spare.pop()", "buffer = self._spare[0]", TABLE),
    Mutant("kernels/launcher.py", "if not self._compiled or _hooked():", "if not self._compiled:", LAUNCHES),
    Mutant(
        "kernels/launcher.py",
        "            self._compiled = ()\n            self._kernel",
        "            self._kernel",
        LAUNCHES,
    ),
    Mutant("kernels/update_scale.py", "due = successful >= tl.load", "due = successful == tl.load", UPDATE),
    Mutant("kernels/update_scale.py", "if strikes >= tl.load", "if strikes > tl.load", POLICY),
    Mutant("kernels/update_scale.py", "0, strikes)", "strikes, strikes)", POLICY),
    Mutant("kernels/update_scale.py", "tl.where(found != 0, streak + 1, 0)", "streak + 1", POLICY),
    Mutant("kernels/common.py", 'tl.atomic_max(place, generation << KIND_BITS, sem="relaxed")', "pass", REPORT),
    Mutant("kernels/common.py", "+ (generation & (GENERATIONS - 1))", "", REPORT),
    # clipping
    Mutant(_S + "placement.py", "if not placement.is_replicate():", "if placement.is_shard():", CLIPPED),
    Mutant(_S + "clipping/copies.py", "return ranks // pieces", "return 1", CLIPPED),
    Mutant(_S + "clipping/at_once.py", "1.0 / copies[position]", "1.0", CLIPPED),
    Mutant(_S + "clipping/at_once.py", "agreement.sum_(totals)", "pass", CLIPPED),
    Mutant(_S + "unscaling.py", "    plan.verdict = None  # the flags", "    pass  # what an earlier", CLIP),
    Mutant(_S + "clipping/arguments.py", "!= len(several) or not several", "== 0", CLIP),
    Mutant(_S + "clipping/at_once.py", "totals[reference_norm.FLAG] = 1.0", "pass", CLIP),
    Mutant(_S + "updating.py", 'if waits and state["owner"]() is not None:', "if waits:", CLIP),
    Mutant(_S + "clipping/at_once.py", " and sum(len(each.pairs) for each in measured) != 1", "", CLIP),
    Mutant(_S + "clipping/at_once.py", "_set_from_sums(measured, totals)\n                totals", "totals", CLIP),
    Mutant(
        _S + "verdict.py", "ranks, self._pending_ranks = self._pending_ranks, 0", "ranks = self._pending_ranks", AGREED
    ),
    Mutant("kernels/clip.py", "(ratio - 1.0)", "(ratio.to(tl.float32) - 1.0)", CLIPS),
    Mutant("kernels/norm.py", "1.0 / scale.to(tl.float64)", "(1.0 / scale).to(tl.float64)", CLIPS),
    Mutant(_S + "verdict.py", "torch.float64, 1.0, 1.0, MAX", "torch.float64, 2.0, 2.0, MAX", AGREED),
    Mutant(_S + "clipping/reference_clip.py", "torch.ones_like(norm) if flag else", "", CLIP),
    Mutant(
        _S + "clipping/reference_clip.py", "torch.where(flag != 0, 1.0, _t", "torch.where(flag != flag, 1.0, _t", CLIP
    ),
    Mutant(_S + "dispatch.py", "(probe.probe_clipping if clips else probe.probe)", "probe.probe", DISPATCH),
    Mutant("kernels/clip.py", "tl.where(bad | (coef > 1.0), 1.0, coef)", "tl.where(coef > 1.0, 1.0, coef)", CLIPS),
    Mutant(
        "kernels/clip.py",
        "tl.div_rn(1.0, norm + 1e-6) * max_norm.to(tl.float32)",
        "tl.div_rn(max_norm.to(tl.float32), norm + 1e-6)",
        CLIPS,
    ),
    Mutant("kernels/clip.py", "tl.debug_barrier()", "pass", SIMULATED),
    Mutant("kernels/common.py", "tl.debug_barrier()", "pass", SIMULATED),
    Mutant("kernels/common.py", "if bad != bad:", "if True:", SIMULATED),
    Mutant("kernels/clip.py", "div_rn(tl.load(scale_ptr), coef)", "div_rn(1.0, coef) * tl.load(scale_ptr)", CLIPS),
    Mutant(
        "kernels/norm.py",
        "tl.store(totals_ptr + FLAG, tl.load(found_inf_ptr)",
        "tl.store(totals_ptr + FLAG, (0.0 * n_partials)",
        CLIPS,
    ),
    Mutant(_S + "unscaling.py", 'or "deferred" in state', "", CLIP),
    Mutant(_S + "clipping/clip.py", "self._fail_together(optimizers, agreement)", "pass", CLIPPED),
    Mutant(_S + "updating.py", "self._refuse_to_lose_clipping(left)\n", "pass\n", CLIP),
    Mutant(_S + "clipping/rank_norms.py", "torch.where(terms[1] != 0, math.nan, terms[0])", "terms[0]", CLIPPED),
    Mutant(_S + "clipping/rank_norms.py", ".sum() / count", ".sum()", CLIPPED),
    Mutant(
        "kernels/norm.py", "total *= tl.load(weight_ptr + tensor)", "total *= 1.0", "tests/kernels/test_norm_kernel.py"
    ),
    Mutant(_S + "clipping/reference_norm.py", "_LOW_SQUARE = 2.0**-120", "_LOW_SQUARE = 0.0", "tests/test_norms.py"),
    # launch configurations
    Mutant(
        "kernels/sweep.py",
        "min(times(each)) > 1 + MARGIN",
        "max(times(each)) > 1 + MARGIN",
        "tests/kernels/test_sweep.py",
    ),
    Mutant("kernels/scratch.py", "self.reset(-1.0)", "self.reset(1.0)", "tests/kernels/test_sweep.py"),
    # the audit
    Mutant(_S + "auditing/replicas.py", "slice(None) if p.is_replicate() else at", "slice(None)", AUDITED),
    Mutant(_S + "auditing/replicas.py", '!= "NO_SHARD"', '== "NO_SHARD"', AUDITED),
    Mutant(_S + "auditing/audit.py", "except Exception as error:", "except KeyError as error:", AUDITED),
    Mutant(_S + "auditing/state.py", "float(scale).hex()", 'f"{scale:g}"', AUDIT),
    Mutant(_S + "auditing/fingerprint.py", "words + positions * STEP", "words", AUDIT),
    Mutant(_S + "auditing/saved_states.py", "weights_only=True", "weights_only=False", AUDIT),
    # torch patched
    Mutant(_S + "patching/stand_in.py", " or issubclass(subclass, originals.get(cls, ()))", "", PATCH),
    Mutant(_S + "patching/patch.py", "_holds.discard(self)", "_holds.clear()", PATCH),
    Mutant(_S + "patching/patch.py", "_rename(stand_in.originals)", "pass", PATCH),
    Mutant("kernels/update_scale.py", "tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)", "grown", UPDATE),
    Mutant("kernels/update_scale.py", "tl.minimum(successful, _MAX_TRACKER)", "successful", UPDATE),
    # frameworks
    Mutant(_S + "integrations/accelerate.py", "self.scaler.was_skipped(self.optimizer)", "False", ACCELERATE),
    Mutant(
        _S + "integrations/accelerate.py",
        'not getattr(self.optimizer, "state", None) and _is_called_from(',
        "(",
        ACCELERATE,
    ),
    Mutant(_S + "integrations/accelerate.py", "_is_called_from(_STATE_MAKER):", "False:", ACCELERATED),
    Mutant(_S + "integrations/accelerate.py", "None if _holds_all(ids, optimizers) else chosen", "chosen", ACCELERATED),
    Mutant(_S + "integrations/accelerate.py", "model=_fsdp1_model(accelerator)", "model=None", ACCELERATED),
    Mutant(_S + "integrations/accelerate.py", "    _check_unprepared(accelerator)\n", "", ACCELERATE),
    Mutant(_S + "unscaling.py", 'if state["stage"] is not OptState.UNSCALED:', "if True:", LIGHTNING),
    Mutant(_S + "unscaling.py", "self._left_unscaled.recall(optimizer)  # if", "None  #", LIGHTNING),
    Mutant(_S + "integrations/backwards.py", "if not unchanged_since(snapshots, optimizer):", "if False:", LIGHTNING),
    Mutant(_S + "states.py", "self._per_optimizer_states.clear()", "pass", LIGHTNING),
    Mutant(_S + "integrations/lightning.py", "model=self._clip_model, ", "", LIGHTNING_RANKS),
    Mutant(_S + "integrations/lightning.py", "or self._no_backward:", "or False:", LIGHTNING),
    Mutant(_S + "integrations/lightning.py", "def unscale_gradients(", "def do_not_unscale(", FABRIC),
    Mutant(_S + "integrations/versions.py", "or package in _warned", "", VERSIONS),
    # other scalers' states, and torch.compile
    Mutant(_S + "migration.py", "(good - 1) % window", "good % window", MIGRATION),
    Mutant(_S + "migration.py", "strikes=hysteresis - tracker", "strikes=hysteresis - tracker + 1", MIGRATION),
    Mutant(_S + "migration.py", "1.0 / factor", "0.5", MIGRATION),
    Mutant(_S + "untraced.py", "                _mark(member)", "                pass", COMPILE),
    Mutant(_S + "compiled.py", 'mutates_args=("grads", "found_inf")', 'mutates_args=("grads",)', COMPILED),
    # the CPU's path
    Mutant(_S + "inverse.py", "_LOW = 2.0**-126", "_LOW = 2.0**-149", INVERSE),
    Mutant(_S + "verdict.py", "            self._host_status.fill(0.0)", "            pass", AGREED),
    Mutant(_S + "reference.py", "tensor.nbytes < _LARGE_BYTES", "True", REFERENCE),
    Mutant(_S + "neighbours.py", "0 if found else _PAUSE", "_PAUSE * 10**6 * (not found)", REFERENCE),
    # what random mutants of all modules showed that no test saw
    Mutant(_S + "gradients.py", "return coalesce_fp16(gradient) if", "return gradient.coalesce() if", CLIP),
    Mutant(_S + "clipping/disabled.py", " if chosen is None or id(p) in chosen", "", CLIP),
    Mutant(
        _S + "clipping/parts.py",
        "for optimizer in optimizers:\n            self._skip(self._state(optimizer))",
        "pass",
        CLIPPED,
    ),
    Mutant(_S + "left_unscaled.py", "self.owner() is optimizer and ", "", UNSTEPPED),
    Mutant(_S + "mirror.py", "except RuntimeError:", "except KeyError:", UNSTEPPED),
    Mutant(_S + "reference_update.py", "elif after < before:", "elif after <= before:", "tests/test_stats.py"),
    Mutant(_S + "auditing/command.py", "if missing else []", "if True else []", AUDIT),
    Mutant("kernels/probe.py", '_expect(f"bits of', 'print(f"bits of', "tests/kernels/test_probe.py"),
    # what is counted, bounded and kept; and modules whose tests no mutant above tries
    Mutant(_S + "stats.py", "if values[UPDATES] >= self._known[UPDATES]:", "if True:", STATS),
    Mutant(_S + "updating.py", "seen[STREAK] > limit:", "seen[STREAK] >= limit:", EXTRAS),
    Mutant(_S + "overflow.py", "counters[SKIPPED] if pending else", "counters[SKIPPED] - 1 if pending else", REPORT),
    Mutant(_S + "overflow_report.py", "self.update is None and not self.pending", "self.update is None", TEXT),
    Mutant(_S + "limits.py", "return _as_fp32(policy.check_scale(value, name))", "return float(value)", EXTRAS),
    Mutant(_S + "states.py", 'and verdict.owns(state["found_inf_per_device"]) else', "else", CONTRACT),
    Mutant(_S + "last_steps.py", "            self._states[key] = None", "            pass", STATS),
    Mutant(_S + "ops.py", " * local.double().reshape(())", "", NORMS),
    Mutant(_S + "clipping/arguments.py", "self.chosen is None and self.norm_type", "self.norm_type", CLIP),
    Mutant(_S + "auditing/comparison.py", "and (among != UNKNOWN) is known", "", AUDITED),
    Mutant(_S + "auditing/report.py", "any(state.error for state in self.ranks)", "False", AUDIT),
    Mutant(_S + "settings.py", "skips\n        self._numbers_changed()", "skips", EXTRAS),
    Mutant(
        _S + "unscaling.py",
        "if self._check_unscaled:",
        "if self._check_unscaled and inv_scale is None:",
        "tests/test_check_unscaled.py",
    ),
    # two devices
    Mutant(_S + "verdict.py", "torch.maximum(self.found_inf, as_flag(flag, self.device))", "flag", AGREED),
    Mutant(_S + "unscaling.py", "(*flags, *plan.devices, self._scale", "(*flags, self._scale", AGREED),
    Mutant("kernels/launcher.py", "elif self._current_device() == self._device.index:", "elif True:", LAUNCHES),
    Mutant("kernels/launcher.py", "with torch.get_device_module(device).device(device):", "if True:", TABLE),
    # found by changing lines at random
    Mutant(_S + "grad_scaler.py", 'state["must_skip"] = True', "pass", FAILURE),
    Mutant(_S + "states.py", 'state["found_inf_per_device"] = {}', "pass", FAILURE),
    Mutant(_S + "states.py", "if state is left]", "if True]", TOUCHED),
    Mutant(_S + "neighbours.py", "left.is_contiguous() and right", "right", REFERENCE),
    Mutant(_S + "left_unscaled.py", "gradient is None if snapshot is None else snapshot", "snapshot", UNSTEPPED),
    Mutant(_S + "clipping/rank_norms.py", "parameter.grad = reduced(parameter.grad)", "pass", UNSTEPPED),
    Mutant(_S + "clipping/arguments.py", "max_norm >= 0", "max_norm > 0", CLIP),
    Mutant(
        _S + "clipping/after_unscaling.py", 'state["found_inf_per_device"] = {each: flag', "flag = {each: flag", CLIP
    ),
    Mutant(_S + "clipping/reference_norm.py", "reference.check_nonfinite(tensors, found_inf)", "pass", NORMS),
    Mutant(
        _S + "settings.py", "for device in self._device_policies:", "for device in ():", "tests/test_capture_state.py"
    ),
    Mutant(_S + "optimizers.py", 'and optimizer.state.get(parameter, {}).get("momentum_buffer") is None', "", STEPS),
    Mutant(_S + "overflow_marks.py", "if len(self._on_host) > _GENERATIONS:", "if False:", REPORT),
    Mutant(_S + "clipping/clip.py", "self._check_deferrable(optimizers, request)", "pass", CLIPPED),
    Mutant(_S + "clipping/clip.py", 'if state["stage"] is OptState.READY:', "if True:", CLIPPED),
    Mutant(_S + "clipping/copies.py", " or plan.copies[1]() is not model", "", CLIPPED),
    Mutant(_S + "unscaling.py", "agreement if isinstance(error, Exception) else None", "agreement", CLIPPED),
    Mutant(_S + "agreeing.py", " or first.joint[0] != key", "", GROUPS),
    Mutant(_S + "compiled.py", "(torch.Tag.cudagraph_unsafe,)", "()", "tests/test_compile_ops.py"),
    Mutant(
        _S + "integrations/accelerate.py", "and not accelerator.is_fsdp2", "", "tests/frameworks/test_accelerate.py"
    ),
    Mutant("kernels/table.py", " or (self._staging is not None and self._staging.is_capturing())", "", TABLE),
    Mutant("kernels/table.py", "launcher.refuse_first_in_capture(device)", "pass", TABLE),
    Mutant(
        "kernels/scratch.py",
        "        self.reset(3.0)\n        self.buffer[",
        "        self.buffer[",
        "tests/kernels/test_sweep.py",
    ),
    Mutant(
        "kernels/probe.py",
        "torch.stack([norm, factor])",
        "torch.stack([_floats(8.0), factor])",
        "tests/kernels/test_probe.py",
    ),
    # found by checking what the pages say
    Mutant(_S + "dispatch.py", 'return _logged(place, "torch", untried)', 'return "torch", untried', DISPATCH),
    Mutant(_S + "migration.py", "{**state, **_NO_HYSTERESIS}", "{**_NO_HYSTERESIS, **state}", MIGRATION),
    Mutant(_S + "overflow.py", "self._plans.plans() if pending or update else ()", "self._plans.plans()", REPORT),
    Mutant(_S + "auditing/replicas.py", "        return ELSEWHERE\n", "        return OPAQUE\n", AUDITED),
    Mutant(_S + "dispatch.py", 'return _logged(place, "torch", reason)', 'return "torch", reason', DISPATCH),
    Mutant(
        _S + "grad_scaler.py", "self._maybe_opt_step(optimizer", "ScalerMixin._maybe_opt_step(self, optimizer", CONTRACT
    ),
    Mutant(_S + "agreeing.py", "not collectives.several_ranks()", "False", "tests/test_collectives.py"),
    Mutant(_S + "agreeing.py", "self._warned_apart = True", "pass", MESHES),
    Mutant(_S + "auditing/saved_tensors.py", "            limit -= tensor.nbytes\n", "", AUDIT),
    Mutant(_S + "auditing/saved_tensors.py", "return STATISTIC if name", 'return "" if name', AUDIT),
    Mutant(_S + "auditing/saved_states.py", "if names[name] > 1 else name", "if False else name", AUDIT),
]
