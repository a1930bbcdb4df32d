"""Settings of all tests."""

from hypothesis import settings

# How long one example takes says more about the machine than about the code; whole tests have a timeout.
settings.register_profile("lit_rl", deadline=None)
settings.load_profile("lit_rl")
