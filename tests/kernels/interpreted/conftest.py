"""Settings shared by the interpreted tests: same examples on every run, no deadline on a busy machine."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))  # the evictor's bench
settings.register_profile("interpreted", deadline=None, derandomize=True, database=None)
settings.load_profile("interpreted")
