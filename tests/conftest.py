"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are slow and noisy: time says nothing about a property.
settings.register_profile("windlass", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("windlass")
