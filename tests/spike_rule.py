"""The rule of spikes in plain NumPy, and series of norms to try it on."""

import math
import random
from collections.abc import Sequence

import numpy as np


def limit_after(history: Sequence[float], sigma: float, window: int) -> float:
    """Return the largest norm that is good after what entered a window; NaN while that is too little."""
    h = np.array(history[-window:], dtype=np.float64)
    if len(h) < max(2, window // 2):
        return math.nan
    return float(h.mean() + sigma * max(h.std(ddof=1), 1e-3 * h.mean()))


def entering(norm: float, limit: float) -> float:
    """Return what a finite norm adds to the window: a spike its limit, unless that is 0."""
    return limit if norm > limit > 0 else norm


def judged(norms: Sequence[float], sigma: float, window: int) -> list[tuple[bool, float]]:
    """Return for each norm whether its step is skipped, and the limit; NaN while there are too few norms for one."""
    history: list[float] = []
    found = []
    for norm in norms:
        limit = limit_after(history, sigma, window)
        found.append((not math.isfinite(norm) or norm > limit, limit))
        if math.isfinite(norm):
            history.append(entering(norm, limit))
    return found


def remembered(norms: Sequence[float], sigma: float, window: int) -> list[float]:
    """Return what a window holds after these norms, oldest first."""
    limits = [limit for _, limit in judged(norms, sigma, window)]
    return [entering(*each) for each in zip(norms, limits, strict=True) if math.isfinite(each[0])][-window:]


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
