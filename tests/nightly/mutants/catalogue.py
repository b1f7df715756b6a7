"""The mutants: wrong versions of the code, and the tests that must notice each."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In the file, `old`, which occurs once, becomes `new`; then `tests` must fail, by default those of its name.

    "unit/step" are those in tests/unit/test_step.py.
    """

    path: str
    old: str
    new: str
    tests: str = ""

    @property
    def noticed_by(self) -> str:
        """The tests that must fail."""
        own = "unit/" + self.path.removeprefix("scaler_triton/").removesuffix(".py")
        folder, _, name = (self.tests or own).rpartition("/")
        return f"tests/{folder}/test_{name}.py"


_CAPTURE = "gpu/capture"
_LISTS = "unit/ops_lists"
_NO_FP64 = "unit/without_fp64"
_LOADS = "unit/grad_scaler"
_FOREIGN = "parity/foreign_code"
_GUARD, _GUARD_RANKS = "unit/step_guard", "fuzz/guard_ranks"
_HEADROOM, _HEADROOM_RANKS = "unit/headroom", "ranks/headroom"
_BITS = "unit/kernels/spike"  # of the kernel and of torch's ops

_BY_FILE: dict[str, list[tuple[str, ...]]] = {
    "scaler_triton/step.py": [
        ("            self.raised = self.stale = False\n", "            self.stale = False\n"),
        ("if self.phase is FAILED and self.stale:", "if False:"),
        ("        if not self.began:  # the", "        if False:  # the"),
        ("                step.stale = True\n", "                pass\n"),
        ("self.raised, self.stale, self.outcome = False, False, None", "self.outcome = None"),
        ("        if self.scaled:\n            self.loss_scaled()\n", "", "parity/compile"),
        ("self.unfinished = self.scaled = False", "self.unfinished = False", "parity/compile"),
        ("            if step.phase is CARRIED:\n                step.keep()", "            if 0:\n                0"),
        ("self.carried, self.flag = self.flag, None", "self.carried = self.flag"),
        ("ones = {each: torch.ones(()", "ones = {each: torch.zeros(()"),
        ("is_kept = not (is_left_out or step.began) if for_guard else not", "is_kept = not", _GUARD),
        ("not (is_left_out or step.began)", "not is_left_out", _GUARD_RANKS),
        ("in (UNSCALED, FAILED) and not step.began\n", "in ()\n", _GUARD),
        ("            step._enter(CARRIED)\n", "            step._enter(UNSCALED)\n"),
        ("            or list(map(id, parameters)) != plan.ids\n", "", "unit/plan"),
        (" and owner is unwrap(optimizer):", ":"),
        ("_PHASES.get(self[\"stage\"], FOREIGN)", "_PHASES.get(self[\"stage\"], READY)", _FOREIGN),
        ("getattr(states, \"default_factory\", None) or dict", "dict", _FOREIGN),
        ("step.reset()\n                step.update(self.new_state())", "pass", _LOADS),
    ],
    "scaler_triton/check.py": [
        ("collect(parameters, allow_fp16=ours.allow_fp16 or not divide)", "collect(parameters, allow_fp16=True)"),
        ("        if not only_here:\n            flag.add(flags.values())\n", ""),
        ("or step[\"found_inf_per_device\"]:\n        flag =", "or False:\n        flag ="),
        ("        if told is not None:\n            by_norm = s", "        if False:\n            by_norm = s"),
        ("    elif step.captured:\n        step.reset()\n", "", _CAPTURE),
        ("weights = [1.0 / replicas[position] for", "weights = [1.0 for", "unit/clip"),
        ("device, by_norm=by_norm, measures=", "device, by_norm=False, measures="),
        ("    if scaler._ours.guard is not None:\n        check(", "    if False:\n        check(", _GUARD),
        ("                step.raised = step.began = True\n", "                pass\n"),
        ("            flag.add(step.kept.values())\n", "", _GUARD),
        ("totals[SQUARES].masked_fill_(flag.found_inf != 0, math.nan)", "pass", _GUARD_RANKS),
        ("        if by_norm and not resumes:\n", "        if by_norm:\n", _GUARD),
        ("                open_window(scaler, scaler._ours", "                (scaler, scaler._ours", _GUARD_RANKS),
        ("        scaler._ours.steps.unfinished = True\n", "", "unit/step"),
        ("is_divided = not divide and step.phase in (UNSCALED, CARRIED)", "is_divided = not divide", _HEADROOM),
        ("        guard.update()\n", "        pass\n", _GUARD),
        ("        scaler._lazy_init_scale_growth_tracker(_home_of(scaler, optimizers))\n    except",
         "        pass\n    except", _GUARD),
        ("again = bool(first.step[\"found_inf_per_device\"])", "again = False", _GUARD),
    ],
    "scaler_triton/flag.py": [
        ("and flag.item() == 0.0):", "and True):"),
        ("(row[abi.LARGEST] / row[abi.MEASURED_AT]) + exponent_of(row[abi.MEASURED_AT])", "(row[abi.LARGEST])"),
        ("            other.measured.zero_()", "            pass", _HEADROOM_RANKS),
        ("        _unpack_(row, sums[abi.TOTALS :])\n", "", _HEADROOM_RANKS),
        ("self._memory[FLAG] = self._memory[FAILED] = 0.0", "self._memory[FLAG] = 0.0"),
        ("if captured or not self.is_zero:", "if not self.is_zero:"),
        ("            self.summed_over = 0\n", "            self.summed_over = None\n"),
        ("return values[FLAG] != 0.0  # NaN is set, too", "return values[FLAG] > 0.0"),
        ("            self._event.synchronize()\n", "", "gpu/gpu"),
        ("[math.nan, 1.0, 1.0, 0.0, 0.0]", "[math.nan, 1.0, 0.0, 0.0, 0.0]", "unit/check"),
    ],
    "scaler_triton/plan.py": [
        ("self.ids = list(map(id, parameters))", "self.ids, self.of = [*map(id, parameters)], parameters", "unit/step"),
        ("all(map(call, compress(self._matchers, here), compress(local, here)))", "not all(here)"),
        ("known = known and layout.backend is not None", "pass"),
        ("        self._match_all = None  # its forms", "        # its forms"),
        ("nullcontext if overrides else _unasked", "_unasked"),
        ("partials[index] = local.detach() * terms", "partials[index] = local.detach()"),
        ("            check_gradient(grad, f\"the gradient of parameter {index}\")\n", "            pass\n"),
    ],
    "scaler_triton/passes.py": [
        ("if not divide or batch.is_partial:", "if not divide:"),
        ("and layout.counters is not plan.marks.counters.values:", "and layout.counters is None:", "unit/report"),
        ("if to_be_marked and abs(here.item()) > 1.0:", "if False:", "unit/report"),
        ("            measure_batch(batch, flag.measured)\n", "            pass\n"),
    ],
    "scaler_triton/torch_ops.py": [
        ("    except (TypeError, RuntimeError):\n        return torch.float32", "    except ():\n        0", _NO_FP64),
        ("    check(tensors, found_inf)  # the squares of large", "    0  # the squares of large", _NO_FP64),
        ("* _LOW_SQUARE <= total.item() < math.inf", "* _LOW_SQUARE <= total.item()"),
        ("largest = torch.where(size.isfinite(), size, 0.0).amax()", "largest = size.amax()", _HEADROOM),
        ("if dtype is not torch.float16 and math", "if math"),
    ],
    "scaler_triton/headroom.py": [
        ("max(largest, row[abi.LARGEST] / row[abi.MEASURED_AT])", "max(largest, row[abi.LARGEST])"),
        ("row[0, abi.MEASURED_AT].fill_(1.0)", "row[0, abi.MEASURED_AT] = 1.0", _CAPTURE),
    ],
    "scaler_triton/update.py": [
        ("            flag.save()\n", "            pass\n", _CAPTURE),
        ("            tracker[0] = counters[abi.STRIKES] = 0\n", "            tracker[0] = 0\n"),
        ("        increment_version((scale,))  # as if", "        pass  # as if"),
        ("    increment_version((scale,))  # as torch's", "    pass  # as torch's"),
        ("if not limits.min_scale <= value <= limits.max_scale:", "if value > limits.max_scale:"),
        ("(strikes + bad) * (bad | keeps_strikes),", "strikes + bad,"),
        ("        or updater.counters is not ours.counters.values\n", ""),
        ("not (captured or step.flag in updater.rows.of_graphs)", "True", "gpu/capture"),
        ("if step.reader is not None and not captured and", "if False and", "gpu/gpu"),
        ("        headroom.on(scale.device)[abi.CAP] = after.reshape(())\n", ""),
    ],
    "scaler_triton/fused.py": [
        ("    step.outcome = found_inf if flag is None else flag  # hooks", "    step.outcome = None  # hooks", _LOADS),
        ("if isinstance(inner, SGD) and _skip_would_corrupt(inner) and found_inf.item():", "if False:"),
        ("        if own is not None:\n            inner.grad_scale = own\n", ""),
    ],
    "scaler_triton/clip.py": [
        (" and is_ours and _squares_fit(scaler)", " and is_ours", _NO_FP64),
        ("len(parts) > 1 and check.has_flag(scaler, part.flags, peers):", "len(parts) > 1:"),
        ("totals[OVERFLOWS] = 1.0  # nothing is clipped then", "pass"),
        ("*(each.step for each in parts)]", "part.step]", "unit/report"),
        ("flag.status[FAILED].clamp_(min=bad >= _FAILURE)", "pass", _GUARD_RANKS),
    ],
    "scaler_triton/step_guard.py": [
        ("self._begin_anew(optimizer, by_check=False)", "pass"),
    ],
    "scaler_triton/spikes.py": [
        ("    if number.is_cpu and type", "    if False and type"),
        ("        if first:\n            enters", "        if True:\n            enters"),
        ("ring[(place + (count - n)) % length]", "ring[place % length]", _BITS),
        ("is_spike = is_finite & (n", "is_spike = (n"),
        ("torch.where(is_spike & (limit > 0), limit, norm)", "norm"),
        ("torch.where(is_spike & (limit > 0), limit", "torch.where(is_spike, limit"),
        ("if values[abi.SPIKE_GENERATION] == generation else None", "if True else None"),
    ],
    "scaler_triton/ranks.py": [
        ("if ours.guard is not None and not is_in_a_group(process_group):", "if False:", _GUARD),
        ("op=getattr(dist.ReduceOp, op)", "op=dist.ReduceOp.SUM"),
    ],
    "scaler_triton/report.py": [
        ("generation = counters[SKIPPED] if pending else counters[SKIPPED] - 1", "generation = counters[SKIPPED]"),
        ("mark >> KIND_BITS in generations:", "True:", "gpu/capture"),
        ("int(checked_at) if went_on_at == generation", "None if True", "gpu/capture"),
    ],
    "scaler_triton/ops.py": [
        ("found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))", "found_inf.copy_(flag)", "gpu/gpu"),
        ("known is not None and known.matches(*scalars, *grads)", "known is not None", _LISTS),
        ("known is not None and _known.pop(key, None) is known and", "known is not None and", _LISTS),
        (" or kernels().launch.capture_query(layout.device)():", ":", _LISTS),
    ],
    "scaler_triton/grad_scaler.py": [
        ("                if step.steps_taken == before:\n", "                if False:\n"),
        ("and self._ours.guard is None)  # `step` will", ")  # `step` will", _GUARD_RANKS),
        ("is_final = phase in (STEPPED, FAILED) or", "is_final = phase is STEPPED or", "unit/check"),
        ("(self, scale, tracker, checked, captured)", "(self, scale, tracker, checked, False)", _CAPTURE),
        ("step.raised, step.outcome, steps.unfinished = True, None, True", "step.raised = True", "unit/step"),
        ("        if ours.steps.unfinished:\n            ours.steps.loss_scaled()\n", "", "unit/step"),
        ("            ours.steps.keep_unstepped(for_guard=ours.guard is not None)\n", "            pass\n"),
        ("keep_unstepped(for_guard=ours.guard is not None)", "keep_unstepped()", _GUARD),
        ("if ours.limits != NO_LIMITS or ours.headroom is not None:", "if ours.limits != NO_LIMITS:", "unit/update"),
        ("        step.outcome = skips  # hooks of the optimizer may ask for it\n", ""),
        ("step.raised, step.outcome, steps.unfinished =", "step.raised, step.fresh, steps.unfinished ="),
        ("        ours.steps.reset()  # what", "        pass  # what"),
        ("if step.phase is FOREIGN:\n            super().unscale_(", "if 0:\n            super().unscale_(", _FOREIGN),
        ("        if before is FOREIGN:\n", "        if False:\n", _FOREIGN),
    ],
    "kernels/unscale.py": [
        ("acc += x * 0.0  # Inf * 0 is NaN, and NaN stays", "acc += x * 1.0"),
        ("inv = tl.div_rn(1.0, inv)", "inv = -inv"),
    ],
    "kernels/chunks.py": [
        ("(generation & (GENERATIONS - 1))", "0"),
        ("(start == 0) & (tail - head < n_elements)", "tail - head < n_elements"),
        ("tl.where(before, lane < head, offs < n_elements)", "offs < n_elements"),
    ],
    "kernels/norm.py": [
        ("if low | (total - total != 0):", "if total - total != 0:"),
    ],
    "kernels/measure.py": [
        ("tl.where(bits < infinity, bits, 0)", "bits"),
        ("bits < smallest_normal", "bits <= smallest_normal"),
        ("zeros -= BLOCK_SIZE * UNROLL - seen", "seen += 0"),
        ("(count & 0xFFFF) - (2 * VEC - n_edges)", "count & 0xFFFF"),
        ("        if top > known:\n", "        if top < known:\n"),
        ("tl.atomic_max(", "tl.atomic_min("),
        ("(lane != _LARGEST) & (found != 0)", "found != 0"),
    ],
    "kernels/clip.py": [
        ("unscaled = narrow(widen(grad) * inv, grad.dtype)", "unscaled = widen(grad) * inv"),
    ],
    "kernels/update_scale.py": [
        ("found = tl.max((flags != 0.0).to(tl.int32), 0)", "found = tl.max((flags > 0.0).to(tl.int32), 0)"),
        ("tl.store(last_flags_ptr + row, flags, mask=chosen)", "pass"),
        ("        tl.store(headroom_ptr + _CAP, new_scale.to(tl.float64))\n", ""),
        ("known = (lane < tl.minimum(count, WINDOW)) & ", "known = (lane < WINDOW) & "),
    ],
    "kernels/spike.py": [
        ("enters = (first != 0) & (before - before == 0)", "enters = before - before == 0"),
        ("(count - n + place) % window", "place", _BITS),
        (" & (norm - norm == 0)\n    last", "\n    last"),
        ("tl.where(is_spike & (limit > 0), limit, norm)", "norm"),
        ("tl.where(is_spike & (limit > 0), limit", "tl.where(is_spike, limit", _BITS),
        ("        tl.store(totals_ptr + _OVERFLOWS, overflows)\n", ""),
        ("tl.sum(tl.reshape(x, [BLOCK_SIZE // 2, 2]), 1)", "tl.sum(tl.reshape(x, [2, BLOCK_SIZE // 2]), 0)", _BITS),
    ],
    "kernels/table.py": [
        ("if known is None or self._is_capturing():", "if known is None:"),
        ("            self._unused += self._known.values()", "            self._unused.extend(())"),
        ("        self.launches.clear()\n", "", "unit/kernels/chunks"),
    ],
}  # fmt: skip

MUTANTS = [Mutant(path, *each) for path, group in _BY_FILE.items() for each in group]
