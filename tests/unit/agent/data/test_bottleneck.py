import pytest

from holdfast.data.loading_probe import IterationTimes, LoadingTimes, describe_loading, expected_wait_seconds


def probed(fetch, prep, workers):
    return LoadingTimes(fetch_seconds=fetch, prep_seconds=prep, batches=50, workers=workers)


def pace(compute, wait, batches=1.0):
    return IterationTimes(compute_seconds=compute, wait_seconds=wait, iterations=64, batches=batches)


@pytest.mark.parametrize(
    ("workers", "compute", "batches", "expected"),
    [
        (0, 0.5, 1, 0.04),  # whatever it computes for: nothing is loaded meanwhile
        (0, 0.5, 3, 0.12),
        (1, 0.03, 1, 0.01),
        (1, 0.05, 1, 0.0),
        (2, 0.015, 1, 0.005),
        (2, 0.03, 2, 0.01),
        (4, 0.01, 1, 0.0),
    ],
)
def test_an_iteration_waits_for_what_is_not_loaded_beside_it(workers, compute, batches, expected):
    waits = expected_wait_seconds(probed(0.03, 0.01, workers), pace(compute, 0.0, batches))
    assert waits == pytest.approx(expected)


def test_without_workers_everything_is_waited_for_and_one_would_hide_it():
    assert describe_loading(probed(0.03, 0.012, 0), pace(0.05, 0.043), processors=8) == (
        "a batch takes 42 ms to load: 30 ms fetching and 12 ms preparing (over 50 batches). "
        "An iteration computes for 50 ms and should wait 42 ms for data, since without workers nothing is "
        "loaded while it computes; the last 64 waited 43 ms each. "
        "Remedies: num_workers=1, if the disk is fast enough"
    )


def test_workers_that_keep_up_are_told_to():
    assert describe_loading(probed(0.03, 0.012, 2), pace(0.025, 0.0), processors=8) == (
        "a batch takes 42 ms to load in each of 2 workers: 30 ms fetching and 12 ms preparing, so that one is "
        "ready every 21 ms (over 50 batches). "
        "An iteration computes for 25 ms, and loading keeps up; the last 64 waited 0 s each"
    )


@pytest.mark.parametrize(
    ("fetch", "prep", "workers", "compute", "processors", "remedies"),
    [
        (
            0.03,
            0.01,
            1,
            0.02,
            8,
            "num_workers=2, if the disk is fast enough; or a faster disk or a cache",
        ),
        (0.01, 0.03, 1, 0.02, 8, "num_workers=2; or cheaper preparation"),
        (0.015, 0.015, 1, 0.02, 8, "num_workers=2; or a faster disk or a cache; or cheaper preparation"),
        (0.01, 0.09, 2, 0.02, 4, "cheaper preparation"),
        (
            0.09,
            0.01,
            1,
            0.02,
            1,
            "num_workers=5, if the disk is fast enough; or a faster disk or a cache",
        ),
    ],
)
def test_what_would_end_a_wait_by_itself_is_named(fetch, prep, workers, compute, processors, remedies):
    said = describe_loading(probed(fetch, prep, workers), pace(compute, 0.0), processors)
    assert said.endswith(f"Remedies: {remedies}")


@pytest.mark.parametrize(
    ("fetch", "prep", "greater"),
    [(0.3, 0.2, "The larger part is fetching"), (0.2, 0.3, "preparing, for which 2 processors are too few")],
)
def test_where_nothing_would_by_itself_the_greater_part_is_named(fetch, prep, greater):
    assert greater in describe_loading(probed(fetch, prep, 2), pace(0.01, 0.2), processors=2)


def test_a_second_reading_that_saves_nothing_is_no_proof_of_a_cache():
    said = describe_loading(probed(0.0001, 0.02, 1), None)
    assert said.startswith("a batch takes 20 ms to load: 100 µs fetching and 20 ms preparing")
    assert "the data is already cached, or cannot be cached" in said


def test_a_wait_that_loading_does_not_explain_is_told():
    unexplained = "That is more than loading explains"
    assert unexplained in describe_loading(probed(0.03, 0.01, 4), pace(0.02, 0.01), processors=8)
    assert unexplained not in describe_loading(probed(0.03, 0.01, 4), pace(0.02, 0.001), processors=8)
    assert unexplained not in describe_loading(probed(0.03, 0.01, 1), pace(0.02, 0.022), processors=8)


def test_without_a_pace_only_loading_is_told():
    assert describe_loading(probed(1.2, 0.5, 1), None) == (
        "a batch takes 1.7 s to load: 1.2 s fetching and 500 ms preparing (over 50 batches)"
    )


def test_iterations_of_several_batches_are_told_as_such():
    assert "An iteration computes for 50 ms over 4 batches" in describe_loading(
        probed(0, 0.01, 1), pace(0.05, 0, 4)
    )
