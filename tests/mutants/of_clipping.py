"""Mutants of clipping."""

from __future__ import annotations

from mutant import CLIP, CLIPPED, NORMS, SPLIT, UNSTEPPED, Mutant

_S = "scaler_triton/"
MUTANTS = [
    Mutant(_S + "clipping/after_unscaling.py", "self._take_flag(part, flag)", "pass", CLIP),
    Mutant(_S + "clipping/after_unscaling.py", "first = first or error", "raise", CLIPPED),
    Mutant(_S + "clipping/after_unscaling.py", "self._enter_unscaled(part.state)", "pass", UNSTEPPED),
    Mutant(
        _S + "clipping/after_unscaling.py",
        'part.state["before_loss"] = first_snapshot(part.optimizer)',
        "pass",
        UNSTEPPED,
    ),
    Mutant(
        _S + "clipping/after_unscaling.py", 'state["found_inf_per_device"] = {each: flag', "flag = {each: flag", CLIP
    ),
    Mutant(_S + "clipping/arguments.py", "!= len(several) or not several", "== 0", CLIP),
    Mutant(_S + "clipping/arguments.py", "self.chosen is None and self.norm_type", "self.norm_type", CLIP),
    Mutant(_S + "clipping/arguments.py", "max_norm >= 0", "max_norm > 0", CLIP),
    Mutant(_S + "clipping/at_once.py", "write_scales(totals[reference_norm.SCALES :], self._scale)", "pass", SPLIT),
    Mutant(_S + "clipping/at_once.py", "each.verdict.set_shared(totals[reference_norm.FLAG])", "pass", CLIP),
    Mutant(_S + "clipping/at_once.py", "1.0 / copies[position]", "1.0", CLIPPED),
    Mutant(_S + "clipping/at_once.py", "agreement.sum_(totals)", "pass", CLIPPED),
    Mutant(_S + "clipping/at_once.py", "totals[reference_norm.FLAG] = 1.0", "pass", CLIP),
    Mutant(_S + "clipping/at_once.py", " and sum(len(each.pairs) for each in measured) != 1", "", CLIP),
    Mutant(_S + "clipping/at_once.py", "_set_from_sums(measured, totals)\n                totals", "totals", CLIP),
    Mutant(_S + "clipping/at_once.py", " or layout.weights[0] is not copies", "", CLIP),
    Mutant(_S + "clipping/at_once.py", "self._enter_unscaled(part.state)", "pass", CLIP),
    Mutant(_S + "clipping/clip.py", "self._fail_together(optimizers, agreement)", "pass", CLIPPED),
    Mutant(_S + "clipping/clip.py", "self._check_deferrable(optimizers, request)", "pass", CLIPPED),
    Mutant(_S + "clipping/clip.py", 'if state["stage"] is OptState.READY:', "if True:", CLIPPED),
    Mutant(_S + "clipping/copies.py", "if pieces > ranks:", "if False:", CLIPPED),
    Mutant(_S + "clipping/copies.py", "    if not plan.grad_shards:", "    if True:", CLIPPED),
    Mutant(_S + "clipping/copies.py", "return ranks // pieces", "return 1", CLIPPED),
    Mutant(_S + "clipping/copies.py", " or plan.copies[0] != key", "", CLIPPED),
    Mutant(_S + "clipping/disabled.py", "has_fsdp1(parameters)", "False", CLIPPED),
    Mutant(_S + "clipping/disabled.py", "dtensor_spec(parameter) is None", "True", CLIPPED),
    Mutant(_S + "clipping/disabled.py", "together = (sharded or", "together = (False or", CLIPPED),
    Mutant(_S + "clipping/disabled.py", " if chosen is None or id(p) in chosen", "", CLIP),
    Mutant(
        _S + "clipping/parts.py",
        "for optimizer in optimizers:\n            self._skip(self._state(optimizer))",
        "pass",
        CLIPPED,
    ),
    Mutant(_S + "clipping/rank_norms.py", " if placed else count", " if False else count", CLIPPED),
    Mutant(_S + "clipping/rank_norms.py", "torch.where(terms[1] != 0, math.nan, terms[0])", "terms[0]", CLIPPED),
    Mutant(_S + "clipping/rank_norms.py", ".sum() / count", ".sum()", CLIPPED),
    Mutant(_S + "clipping/rank_norms.py", "parameter.grad = reduced(parameter.grad)", "pass", UNSTEPPED),
    Mutant(_S + "clipping/reference_clip.py", "torch.ones_like(norm) if flag else", "", CLIP),
    Mutant(
        _S + "clipping/reference_clip.py", "torch.where(flag != 0, 1.0, _t", "torch.where(flag != flag, 1.0, _t", CLIP
    ),
    Mutant(
        _S + "clipping/reference_norm.py",
        "_quick_sum(tensors)",
        "_quick_sum(sorted(tensors, key=Tensor.data_ptr))",
        CLIP,
    ),
    Mutant(_S + "clipping/reference_norm.py", "_LOW_SQUARE = 2.0**-120", "_LOW_SQUARE = 0.0", "tests/test_norms.py"),
    Mutant(_S + "clipping/reference_norm.py", "reference.check_nonfinite(tensors, found_inf)", "pass", NORMS),
]
