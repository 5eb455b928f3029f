"""Profiles, settings and histories for tests of interval policies, plausible and odd ones."""

from __future__ import annotations

import math
from functools import partial

from hypothesis import strategies as st

from holdfast.pacing import FailureEstimate, FailureHistory, PacingSettings, Profile

CheckfreqSettings = partial(PacingSettings, policy="checkfreq")
"""Settings of a job that spends its budget in full."""
MEASURED = Profile(iteration_seconds=0.5, snapshot_seconds=0.3, persist_seconds=2.2, cost_seconds=0.35)

seconds = st.floats(min_value=0, max_value=1e4)
budgets = st.floats(min_value=1e-4, max_value=1.0)
means = st.floats(min_value=60.0, max_value=1e8)
profiles = st.builds(
    Profile,
    iteration_seconds=st.floats(min_value=1e-3, max_value=1e3),
    update_seconds=seconds,
    snapshot_seconds=seconds,
    device_copy_seconds=seconds | st.just(math.inf),
    persist_seconds=seconds,
    in_flight=st.integers(1, 4),
    checkpoint_bytes=st.integers(0, 2**40),
    memory_used_bytes=st.integers(0, 2**40),
    memory_total_bytes=st.integers(0, 2**40),
    cost_seconds=seconds | st.none(),
)

odd_numbers = st.floats() | st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e308])
odd_profiles = st.builds(
    Profile,
    iteration_seconds=odd_numbers | st.just(1.0),
    update_seconds=odd_numbers,
    snapshot_seconds=odd_numbers,
    device_copy_seconds=odd_numbers,
    persist_seconds=odd_numbers,
    in_flight=st.integers(-1, 3),
    memory_used_bytes=st.integers(-10, 10),
    memory_total_bytes=st.integers(-10, 10),
    cost_seconds=odd_numbers | st.none(),
)
odd_settings = st.builds(
    PacingSettings,
    budget=odd_numbers | st.just(0.035),
    mtbf_seconds=odd_numbers | st.none(),
    write_bytes_per_second=odd_numbers | st.none(),
    max_unsaved_seconds=odd_numbers | st.just(600.0),
)
odd_histories = st.builds(
    FailureHistory,
    failures=st.builds(
        FailureEstimate,
        count=st.floats(0, 1e6),
        exposure_seconds=st.floats(0, 1e9),
        world_size=st.integers(-1, 10**6),
        mean_seconds=odd_numbers | st.none(),
    ),
    restart_seconds=odd_numbers,
)
