"""GradScaler as `torch.cuda.amp` has it, for `patch_torch`; both are called so, which takes a module for each."""

from scaler_triton.patching.deprecated import DeprecatedGradScaler


class GradScaler(DeprecatedGradScaler):
    """Drop-in for `torch.cuda.amp.GradScaler`, which is deprecated: `scaler_triton.GradScaler("cuda", ...)`."""

    _kind = "cuda"
