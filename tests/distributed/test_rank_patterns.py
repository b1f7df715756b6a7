"""What public training code of several ranks does to a scaler ends as with torch's class, to the bit."""

from itertools import pairwise

import pattern_cases
import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [(kind, pattern) for kind, patterns in pattern_cases.PATTERNS.items() for pattern in patterns],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_pattern_ends_as_with_torch(two, kind, pattern):
    for theirs, ours in two.run(pattern_cases.beside_torch, pattern, kind):
        assert ours == theirs
        scales = [float(line.split()[0]) for line in ours if " " in line]
        assert any(after < before for before, after in pairwise(scales))  # it did back off
