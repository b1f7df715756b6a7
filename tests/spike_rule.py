"""The rule of spikes in plain NumPy, and series of norms to try it on."""

import math
import random
from collections.abc import Sequence

import numpy as np


def judged(norms: Sequence[float], sigma: float, window: int) -> list[tuple[bool, float]]:
    """Return for each norm whether its step is skipped, and the limit; NaN while there are too few norms for one."""
    history: list[float] = []
    found = []
    for norm in norms:
        h = np.array(history[-window:], dtype=np.float64)
        limit = math.nan
        if len(h) >= max(2, window // 2):
            limit = h.mean() + sigma * max(h.std(ddof=1), 1e-3 * h.mean())
        found.append((not math.isfinite(norm) or norm > limit, float(limit)))
        if math.isfinite(norm):
            history.append(norm)
    return found


def series(draw: random.Random, length: int) -> list[float]:
    """Return norms of one kind or several: constant, drifting, noisy, with bursts, zeros and what is not finite."""
    level, drift = 10 ** draw.uniform(-6, 6), draw.choice([1.0, 1.0, 0.9, 1.02, 1.3])
    noise, bursts = draw.choice([0.0, 1e-4, 0.1, 1.0]), draw.choice([0.0, 0.05, 0.3])
    zeros, bad = draw.choice([0.0, 0.0, 0.3, 1.0]), draw.choice([0.0, 0.0, 0.1])
    norms = []
    for _ in range(length):
        level *= drift
        norm = level * (1 + noise * draw.random()) * (10 ** draw.uniform(0, 3) if draw.random() < bursts else 1.0)
        norm = 0.0 if draw.random() < zeros else norm
        norms.append(draw.choice([math.nan, math.inf]) if draw.random() < bad else norm)
    return norms
