"""How far gradients are from overflow: `measure=True`, `headroom()` and the headroom policy."""
