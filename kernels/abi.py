"""Every number that host and kernels share, once: the layout of what they exchange, and the limits of the scale."""

# The status of an optimizer's step, fp32 [STATUS], which the ranks reduce to their maximum: the flag (found_inf),
# whether a rank failed to check its gradients, and two numbers by which the ranks' scales are compared: the scale and
# its negative or, where clipping summed over the ranks, the sum of the scales and their excess (see `kernels/clip.py`).
FLAG, FAILED, SCALE, EXCESS = range(4)
STATUS = 4
# Rows of status that one update can read.
ROWS = 32

# The totals of a norm's pass, fp64 [TOTALS], which the ranks sum: squares, overflows, failures, and the scale and its
# inverse, by which the ranks' scales are compared.
SQUARES, OVERFLOWS, FAILURES, SCALES, INVERSES = range(5)
TOTALS = 5

# Counters of updates, int64 [COUNTERS]. Strikes: the overflows that count towards `hysteresis`.
UPDATES, SKIPPED, STREAK, GROWTHS, BACKOFFS, LAST_SKIP, STRIKES = range(7)
COUNTERS = 7

# The numbers of the update rule, fp64 [POLICY]. An interval is exact wherever a tracker can reach it.
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL, MIN, MAX, HYSTERESIS = range(6)
POLICY = 6

# 1 / scale is finite for every scale from the smallest normal fp32 number to the largest.
MIN_SCALE = 2.0**-126
MAX_SCALE = (2.0 - 2.0**-23) * 2.0**127
MAX_TRACKER = 2**31 - 1

# A mark of what a gradient held: the kinds in the low bits, above them the generation, which is the number of skips
# before. A tensor has marks of so many generations: a power of 2.
NAN, INF = 1, 2
KIND_BITS = 2
GENERATIONS = 4
GENERATION_MASK = (1 << 28) - 1
