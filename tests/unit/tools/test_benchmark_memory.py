"""The slope of a server's memory, and how sure it is."""

from __future__ import annotations

import random

import pytest

from benchmarks.ingest.memory import MemorySample, append_sample, read_samples, slope


def samples(megabytes_per_hour: float, noise: float = 0.0) -> list[MemorySample]:
    chance = random.Random(1)
    hours = [number / 360 for number in range(720)]
    return [MemorySample(at, 150 + megabytes_per_hour * at + chance.gauss(0, noise)) for at in hours]


def test_the_slope_of_samples_on_a_line_has_no_error():
    found = slope(samples(3.0))
    assert found.megabytes_per_hour == pytest.approx(3.0)
    assert found.error == pytest.approx(0.0, abs=1e-9)


def test_noise_is_within_the_error():
    found = slope(samples(0.0, noise=2.0))
    assert 0 < abs(found.megabytes_per_hour) < 3 * found.error


def test_too_few_samples_have_no_slope():
    with pytest.raises(ValueError, match="5 samples; a slope needs at least 12"):
        slope(samples(1.0)[:5])


def test_samples_are_read_as_they_were_written(tmp_path):
    append_sample(tmp_path / "memory.csv", 0.0, 150_000_000)
    append_sample(tmp_path / "memory.csv", 0.0, 151_000_000)
    assert [sample.megabytes for sample in read_samples(tmp_path / "memory.csv")] == [150.0, 151.0]
