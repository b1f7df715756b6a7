"""The constants that the host shares with the kernels, each defined once. Imports neither torch nor triton.

A status row is one optimizer's flag and what its ranks compare; totals are what a norm's pass leaves for the clip.
Where there are several ranks, both are reduced over them before anyone reads them.
"""

# A status row, fp32: the flag (found_inf), whether a check failed, and two numbers that compare the ranks' scales.
# After a MAX reduction these are max(scale) and max(-scale); after a SUM the sum of the scales and their excess, which
# is 0 if all are equal.
FLAG, FAILURE, SCALE, EXCESS = range(4)
STATUS = 4
# Rows in a buffer of flags: the most flags that one update reads, one for each lane of a warp.
ROWS = 32

# Totals of a norm's pass, fp64, which ranks sum: the sum of squares, the flags, the failed checks, and the scales and
# their inverses, by which the ranks compare their scales.
SQUARES, OVERFLOWS, FAILURES, SCALES, INVERSES = range(5)
TOTALS = 5

# What measuring leaves, fp64: the largest finite |g|, and how many elements were 0, an fp16 subnormal
# (0 < |g| < 2^-14), and seen at all; of gradients as they are, which is scaled.
LARGEST, ZEROS, SUBNORMAL, SEEN = range(4)
MEASURED = 4
MEASURED_AT = 4  # behind these in a flag's row: the scale
MEASURED_ROW = 5
SMALLEST_NORMAL = 2.0**-14  # of fp16

# Counters, int64: of updates, and of spikes. A strike is an overflow that counts towards the hysteresis.
UPDATES, SKIPPED, STREAK, GROWTHS, BACKOFFS, LAST_SKIP, STRIKES, SPIKES = range(8)
COUNTERS = 8

# A guard's window, fp64: a header, and behind it a ring of the last finite norms, of spikes their limits. The header:
# how many entered the ring; what the norm judged last adds to it when the next step is judged, and whether that norm
# was a spike (1, else 0; NOT_JUDGED until there is one); norm, limit and generation (see below) of the last spike; and
# the rule's sigma.
COUNT, LAST, IS_SPIKE, SPIKE_NORM, SPIKE_LIMIT, SPIKE_GENERATION, SIGMA = range(7)
HEADER = 8
NOT_JUDGED = -1.0
MAX_WINDOW = 4096  # one program holds all of it in registers

# The numbers of the update rule, fp64 on the device. The interval is exact wherever it can be reached: the growth
# tracker stops at MAX_TRACKER.
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL, MIN, MAX, HYSTERESIS = range(6)
POLICY = 6

# What the headroom policy remembers, fp64: how many exponents entered its ring, the cap of the scale, and the ring.
EXPONENTS, CAP = range(2)
HEADROOM_HEADER = 2
FP16_EXPONENT = 15  # of the largest fp16
MAX_HEADROOM_WINDOW = 1024

# Between these two the inverse of the scale is finite, and not 0.
MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**128 - 2.0**104  # the largest fp32
MAX_TRACKER = 2**31 - 1

# A tensor's marks, int32 [GENERATIONS]: which kinds of non-finite elements it had. A mark has the generation, which is
# the number of skips before, above its KIND_BITS; that of generation g stands at g % GENERATIONS.
NAN, INF = 1, 2
KIND_BITS = 2
GENERATIONS = 4  # a power of 2
GENERATION_MASK = (1 << 28) - 1
