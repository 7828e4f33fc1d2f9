"""What two prompts begin with alike."""

from __future__ import annotations

from array import array

import numpy as np

from nexus_sglang.prefixes import common_prefix


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix(array("q", [7, 8, 9]), np.asarray([7, 8], dtype=np.int32)) == 2
