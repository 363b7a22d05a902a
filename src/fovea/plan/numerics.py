"""Numeric constants that kernels, their device twins and the reference share.

Lives here: constants alone, each with its source. Not here: the formulas that use them
(`reference/numerics.py`) and their device twins (`kernels/device/`). Invariant: no other module
spells one of these numbers.
"""

LOG2_E = 1.4426950408889634  # float64 nearest to 1 / ln 2
LN_2 = 0.6931471805599453  # float64 nearest

# How far, in log2 units, a row's maximum may rise above the reference of its exponentials before
# O and the row sum are rescaled. 0 = the reference is the running maximum of all tiles so far.
RESCALE_THRESHOLD_LOG2 = 0.0

# The same where each look at O costs (tensor memory of sm_100a). P stays below 2^8, far inside the
# range of float16, and relative precision does not depend on the reference.
LAZY_RESCALE_LOG2 = 8.0

# Software exp2 of a fraction f in [0, 1): 1 + c1 f + ... + c4 f^4, minimax in relative error with
# the constant term fixed to 1, float32. Derived by scripts/derive_polynomials.py. Degree 3
# (8.6e-5) would do for P, which is rounded to 16 bits, but not for lse, a sum of such errors.
EXP2_COEFFICIENTS = (
    0.6930448412895203,
    0.2412802129983902,
    0.0522424690425396,
    0.013426684774458408,
)
EXP2_RELATIVE_ERROR = 2.897e-6  # largest on [0, 1), in exact arithmetic
# An argument x reaches the software exponential as (EXP2_HIGHEST - x) / EXP2_SPAN, rounded, which
# an instruction can hold between 0 and 1 at no cost. So x is held between -63 and 65: one unit
# above the lowest the power is 0, and NaN becomes the highest. Half a unit in the last place of a
# number near 1/2, where x = 0 lies, is an error of the argument, in a relative one of the power.
EXP2_HIGHEST = 65.0
EXP2_SPAN = 128.0
EXP2_ARGUMENT_ERROR = 2.0**-25 * EXP2_SPAN * LN_2

# KV columns of one step of the online softmax in the reference, unless a caller asks for another
# kernel's tile: the tile of most sm_90a plans, and torch's default block of a BlockMask.
REFERENCE_TILE_N = 128

# The optimistic reference: a row is redone with the running maximum when its sum
# of exponentials is not below this, or an element of its output is not finite. No single P can then
# have come near the bfloat16 limit of 2^128. Nor may the sum be less than the second number, which
# keeps the largest of 2^40 terms, and what is 2^-22 of it, above the least normal number 2^-126.
OPTIMISTIC_SUM_LIMIT = 2.0**100
# The same where exponentials are done in software, whose highest is 2^EXP2_HIGHEST.
SOFTWARE_SUM_LIMIT = 2.0**64
OPTIMISTIC_SUM_LEAST = 2.0**-64
# What a thread's sum of a tile must stay below where P is float16, which ends at 2^16: no P can be
# greater than the sum.
HALF_SUM_LIMIT = 2.0**15
# What rounding leaves of a reference, up to half its last place, is in every exponent of its row.
# From here on, in log2 units, that may be more than exp2 bears. Two scores that differ do so by as
# much, so that but for the largest of such a row nothing counts.
HUGE_REFERENCE = 2.0**30
# The same where P is float16, which bears less. The smaller of two scores that differ still counts
# for up to 2^-4, but scores in float32 are not more exact than that here.
HALF_HUGE_REFERENCE = 2.0**26
# The same where exponentials are done in software, whose arguments are rounded to 2^-24 of the
# reference: as much as P is rounded by.
SOFTWARE_HUGE_REFERENCE = 2.0**16

# tanh(x) = x (1 + c1 y + ... + c5 y^5) for x^2 <= TANH_LARGEST_SQUARE, y = 2 x^2, float32, by the
# same script. Beyond, 1 - 2 / (1 + e^(2x)) does not lose more than a place or two.
TANH_COEFFICIENTS = (
    -0.16666588187217712,
    0.03332200646400452,
    -0.006692180875688791,
    0.0012521405005827546,
    -0.00015892695228103548,
)
TANH_RELATIVE_ERROR = 1.7594e-8  # largest there, in exact arithmetic
TANH_LARGEST_SQUARE = 0.5

# tanh(x) = x (1 + c1 y + ... + c4 y^4) for |x| <= CAP_LIMIT, y = (x / CAP_LIMIT)^2, by the same
# script: what optimistic kernels make of a soft cap, without the two special functions of the whole
# range. A row with a score beyond is redone. A limit of 1 would take a coefficient more.
CAP_COEFFICIENTS = (
    -0.18747937679290771,
    0.0419815294444561,
    -0.008948396891355515,
    0.00131206342484802,
)
CAP_RELATIVE_ERROR = 6.494e-7  # largest there, in exact arithmetic
CAP_LIMIT = 0.75

# sin(x) = x (1 + c1 x^2 + c2 x^4 + c3 x^6) and cos(x) = 1 + c1 x^2 + ... + c4 x^8 for |x| <= 1,
# float32, by the same script: sine, cosine and tangent in mods, of angles reduced below pi / 4.
SINE_COEFFICIENTS = (-0.1666661500930786, 0.00833024363964796, -0.00019313291704747826)
SINE_RELATIVE_ERROR = 2.873e-8
COSINE_COEFFICIENTS = (
    -0.4999999701976776,
    0.04166645556688309,
    -0.0013882960192859173,
    2.4118640794767998e-05,
)
COSINE_RELATIVE_ERROR = 4.291e-9
# pi / 2 as a sum of float32: so many times the first, taken from an angle up to SMALL_ANGLE,
# is exact, and what the others leave of pi / 2 is 1e-23.
HALF_PI_PARTS = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
SMALL_ANGLE = 2.0**16
# 2 / pi times 2 to the number of its bits: as many as the largest float32 needs.
TWO_OVER_PI_BITS = 224
TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163AB
