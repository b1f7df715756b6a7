"""`clip_grad_norm_`: a norm over all ranks, and gradients that are read once and written once."""
