"""Settings shared by the interpreted tests: same examples on every run, no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("interpreted", deadline=None, derandomize=True, database=None)
settings.load_profile("interpreted")
