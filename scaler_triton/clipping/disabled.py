"""`clip_grad_norm_` of a disabled scaler: gradients are clipped, neither unscaled nor checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.agreement import Agreement, inferred_agreement, sharded_agreement
from scaler_triton.batch import first_device
from scaler_triton.clipping import reference_clip, reference_norm
from scaler_triton.clipping.arguments import Request
from scaler_triton.clipping.copies import copies_of
from scaler_triton.clipping.rank_norms import local_gradients, multiply_, norm_of_terms, terms_of_norm
from scaler_triton.collectives import several_ranks
from scaler_triton.placement import dtensor_spec, has_fsdp1


def clip_unscaled(parameters: Sequence[Tensor], request: Request, group: Any, *, sharded: bool) -> Tensor:
    """Clip as torch does; where ranks hold shards, by the norm over all ranks.

    Args:
        parameters: all of the optimizers'; their gradients are written.
        group: the scaler's process group.
        sharded: the norm is over all ranks of the group, whatever the parameters are; None is the default group then.

    Returns: the norm, `()`, as torch's clipping does; fp32 if it is over several ranks.

    Raises: ValueError naming `model` as `copies_of`; torch's RuntimeError for a norm that is not finite.
    """
    max_norm, norm_type, error_if_nonfinite, model, chosen = request
    together = (sharded or group is not None) and several_ranks()
    if not together and _torch_can_clip(parameters):
        clipped = [p for p in parameters if chosen is None or id(p) in chosen]
        return torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite)
    agreement = _agreement(parameters, group, together)
    with torch.no_grad():
        copies = copies_of(parameters, agreement, model)
        gradients, counts = local_gradients(parameters, copies, chosen)
        flag = torch.zeros((), dtype=torch.float32, device=first_device(parameters))
        norm, _ = norm_of_terms(terms_of_norm(gradients, counts, norm_type, flag), norm_type, agreement)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise RuntimeError(reference_norm.NONFINITE.format(norm_type))
        multiply_(gradients, reference_clip.coefficient(flag, norm, max_norm))
    return norm


def _torch_can_clip(parameters: Sequence[Tensor]) -> bool:
    """Tell whether torch's clipping computes the right norm: only if this rank holds whole gradients."""
    if has_fsdp1(parameters):
        return not several_ranks()
    return all(dtensor_spec(parameter) is None for parameter in parameters)


def _agreement(parameters: Sequence[Tensor], group: Any, together: bool) -> Agreement | None:
    if together or group is not None or has_fsdp1(parameters):
        return sharded_agreement(parameters, group)
    return inferred_agreement(parameters)
