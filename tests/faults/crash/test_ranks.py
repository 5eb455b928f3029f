"""A rank that dies, fails or stops takes nothing with it but the checkpoint in hand."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.store import Lineage, open_store
from tests.support.multi_rank import Rank, RankLauncher
from tests.support.store_invariants import safe, violations
from tests.support.trial_pool import AT_ONCE, LONG, every_other

pytestmark = pytest.mark.crash

WORLD = 3
WORK = "tests.support.rank_crash_workloads.train"
LOST = "checkpoints stop, training continues"
LEADS = [
    "before begin", "after begin", "before send begun", "after send begun", "before write", "before sync",
    "after sync", "after write", "after settle", "before receive vote", "after receive vote", "before commit",
    "before rename", "after rename", "after commit", "before send end", "after send end",
]  # fmt: skip
FOLLOWS = [
    "before receive begun", "after receive begun", "before join", "after join", "before write", "before sync",
    "after sync", "after write", "after settle", "before send vote", "after send vote", "before receive end",
    "after receive end",
]  # fmt: skip
RESUMES = ["before load", "after load", "before check", "after check", "before apply", "after apply"]
REWINDS = ["before load", "after load", "before safety", "before sync", "after safety", "before lineage",
           "after lineage", "before apply", "after apply"]  # fmt: skip
CLOSES = ["before end", "after end", "before sync", "before finish", "after finish", "before part", "after part"]


class RankFault(NamedTuple):
    phase: str
    """In haste, training goes on while two checkpoints are under way; else each is waited for."""
    rank: int
    place: str


DEATHS = [
    *(RankFault("checkpoint", 0, place) for place in LEADS),
    *(RankFault("checkpoint", rank, place) for rank in (1, 2) for place in FOLLOWS),
    *(RankFault("haste", 0, place) for place in LEADS[::2]),
    *(RankFault("haste", rank, place) for rank in (1, 2) for place in FOLLOWS[::2]),
    *(RankFault("resume", rank, place) for rank in range(WORLD) for place in RESUMES),
    *(RankFault("rewind", rank, place) for rank in range(WORLD) for place in REWINDS),
    *(RankFault("rewind", 0, place) for place in ("before note", "after note")),
    *(RankFault("close", rank, place) for rank in range(WORLD) for place in CLOSES),
    *(
        RankFault("close", 0, place)
        for place in ("before commit", "before rename", "after rename", "before send end")
    ),
    *(RankFault("close", 1, place) for place in ("before send vote", "after send vote")),
]
DDP = {"ddp": True}
"""Every iteration is one of all ranks: without one of them there is no other."""
States = dict[tuple[int, int], str]
"""What a rank has learned, by (rank, iteration)."""


@pytest.fixture(scope="module")
def launchers() -> Iterator[list[RankLauncher]]:
    launchers = [RankLauncher("tests.support.rank_crash_workloads") for _ in range(AT_ONCE)]
    yield launchers
    for launcher in launchers:
        launcher.close()


@pytest.fixture(scope="module")
def undisturbed(launchers: list[RankLauncher]) -> States:
    with tempfile.TemporaryDirectory() as root, started(launchers[0], Path(root), until=24) as ranks:
        assert [rank.wait() for rank in ranks] == [0] * WORLD
        return states(ranks)


@pytest.fixture(scope="module")
def undisturbed_ddp(launchers: list[RankLauncher]) -> States:
    with tempfile.TemporaryDirectory() as root, started(launchers[0], Path(root), until=24, options=DDP) as ranks:
        assert [rank.wait() for rank in ranks] == [0] * WORLD
        return states(ranks)


def started(launcher: RankLauncher, root: Path, **options: Any) -> Any:
    return launcher.start(WORLD, WORK, root=str(root), **options)


def states(ranks: list[Rank]) -> States:
    told = [(rank.number, *line.split()) for rank in ranks for line in rank.said("state ")]
    return {(rank, int(iteration)): digest for rank, iteration, digest in told}


def ended(ranks: list[Rank]) -> list[int | None]:
    """How each ended; None for one that does not."""

    def status(rank: Rank) -> int | None:
        try:
            return rank.wait()
        except TimeoutError as error:
            print(error)
            return None

    return [status(rank) for rank in ranks]


def not_whole(root: Path) -> list[str]:
    """What is listed and lacks something that a rank wrote."""
    found, store = [], open_store(root)
    for checkpoint in store.checkpoints("job"):
        stored = read_stored(store, "job", checkpoint)
        manifest = stored.manifest
        files = {path.name for path in (root / "job" / checkpoint).iterdir()}
        parts = {f"rank-{rank}.safetensors" for rank in range(WORLD)}
        if files != {*stored.files, *parts}:
            found.append(f"{checkpoint} consists of {sorted(files)}")
        if {tensor.file for tensor in manifest.tensors} != parts:
            found.append(f"{checkpoint} has nothing of some ranks")
    return found


def different(ranks: list[Rank], undisturbed: States) -> list[str]:
    return [f"{key} is not what it was" for key, state in states(ranks).items() if undisturbed[key] != state]


def goes_on(
    launcher: RankLauncher, root: Path, undisturbed: States, until: int = 18, options: dict[str, Any] | None = None
) -> list[str]:
    """What is wrong with a new start of all ranks."""
    found = [*violations(root, [], leftovers_allowed=2), *not_whole(root)]
    _, best = safe(root)
    with started(launcher, root, until=until, options=options) as ranks:
        if (statuses := ended(ranks)) != [0] * WORLD:
            return [*found, f"a new start ended with {statuses}", *(rank.account() for rank in ranks)]
        for rank in ranks:
            if rank.said("resumed ") != [str(best)]:
                found.append(f"rank {rank.number} went on from {rank.said('resumed ')}, not {best}")
            found += [f"rank {rank.number} told {line}" for line in rank.said("fault ")]
            if rank.said("head ") != [restored := f"{until:012d}-{max(1, lineage(root))}"]:
                found.append(f"rank {rank.number} has {rank.said('head ')}, not {restored}")
        found += different(ranks, undisturbed)
    return [*found, *violations(root, [], leftovers_allowed=0), *not_whole(root)]


def lineage(root: Path) -> int:
    return max(each.number for each in open_store(root).records("job", Lineage))


def killed(launcher: RankLauncher, root: Path, undisturbed: States, death: RankFault) -> list[str]:
    """What is wrong after one rank has died."""
    until, options = 16, {"phase": death.phase, "rank": death.rank, "place": death.place}
    if death.phase == "rewind":
        options |= {"rewind_at": 6}
    if death.phase == "haste":
        options |= {"every": 1, "options": {"max_in_flight": 2}}
    if death.phase == "resume":
        with started(launcher, root, until=6) as ranks:
            assert ended(ranks) == [0] * WORLD
    with started(launcher, root, until=until, **options) as ranks:
        statuses = ended(ranks)
        found = different(ranks, undisturbed)
        for rank, status in zip(ranks, statuses, strict=True):
            expected = -9 if rank.number == death.rank else 1 if death.phase == "resume" else 0
            if status != expected:
                found.append(f"it ended with {status}: {rank.account()}")
            if rank.number == death.rank or death.phase == "resume":
                continue
            found += [f"rank {rank.number} told {line}" for line in rank.said("fault ")]
            told = sum(LOST in line for line in rank.said("notice "))
            if told != 1 and (death.phase not in ("close", "haste") or told > 1):
                found.append(f"rank {rank.number} said {told} times that it is alone: {rank.said('notice ')}")
    return [*found, *goes_on(launcher, root, undisturbed)]


def killed_under_ddp(launcher: RankLauncher, root: Path, undisturbed: States, death: RankFault) -> list[str]:
    """The same where no rank can train without the others: all end, and all go on from what is whole."""
    options = {"phase": death.phase, "rank": death.rank, "place": death.place, "options": DDP}
    with started(launcher, root, until=16, **options) as ranks:
        statuses = ended(ranks)
        found = different(ranks, undisturbed)
        if statuses != [-9 if rank == death.rank else 1 for rank in range(WORLD)]:
            found += [f"ended with {statuses}", *(rank.account() for rank in ranks)]
        found += [f"{rank.number} told {line}" for rank in ranks for line in rank.said("fault ")]
    return [*found, *goes_on(launcher, root, undisturbed, options=DDP)]


def assert_none_wrong(
    launchers: list[RankLauncher],
    place: Path,
    cases: list[Any],
    trial: Callable[[RankLauncher, Path, Any], list[str]],
) -> None:
    free, number = list(launchers), itertools.count()

    def run(case: Any) -> list[str]:
        launcher, root = free.pop(), place / str(next(number))
        try:
            return [f"{case}: {each}" for each in trial(launcher, root, case)]
        except Exception as error:  # one case that cannot be judged is a violation; the others go on
            return [f"{case}: {error!r}"]
        finally:
            free.append(launcher)

    with ThreadPoolExecutor(AT_ONCE) as workers:
        found = [each for wrong in workers.map(run, cases) for each in wrong]
    print(f"{len(cases)} cases, {len(found)} violations")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("step", [14, pytest.param(1, marks=LONG)])
def test_a_rank_that_dies_anywhere_leaves_whole_checkpoints_and_lets_the_others_train(
    launchers: list[RankLauncher], fast_path: Path, undisturbed: States, step: int
) -> None:
    cases = every_other(DEATHS, step)
    assert_none_wrong(launchers, fast_path, cases, lambda *case: killed(*case[:2], undisturbed, case[2]))


COMMITS = [
    *(RankFault("checkpoint", 0, place) for place in LEADS),
    *(RankFault("checkpoint", rank, place) for rank in (1, 2) for place in FOLLOWS),
]


@pytest.mark.parametrize(("step", "times"), [(14, 1), pytest.param(1, 3, marks=LONG)])
def test_under_ddp_a_rank_that_dies_at_any_stage_of_a_commit_leaves_what_all_go_on_from(
    launchers: list[RankLauncher], fast_path: Path, undisturbed_ddp: States, step: int, times: int
) -> None:
    cases = every_other(COMMITS, step) * times

    def trial(launcher: RankLauncher, root: Path, case: RankFault) -> list[str]:
        return killed_under_ddp(launcher, root, undisturbed_ddp, case)

    assert_none_wrong(launchers, fast_path, cases, trial)
    stages = len({(case.rank, case.place) for case in cases})
    print(f"ranks under DDP: {len(cases)} deaths at {stages} stages of a commit by {WORLD} ranks, no part missing")


@pytest.mark.parametrize("times", [6, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("vote_bytes", [50, pytest.param(20_000_000, marks=LONG)])
def test_whoever_talks_to_a_rank_that_dies_is_told(
    launchers: list[RankLauncher], tmp_path: Path, times: int, vote_bytes: int
) -> None:
    """A large vote is half-way through when a rank dies, and gloo then says nothing to who receives it."""
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"the first of these jobs is HOLDFAST_TEST_SEED={seed}")

    def told(launcher: RankLauncher, root: Path, number: int) -> list[str]:
        chosen = random.Random(number)
        options = {"rank": chosen.randrange(WORLD), "after": chosen.randrange(1, 200 if vote_bytes < 1000 else 12)}
        with launcher.start(
            WORLD, "tests.support.rank_crash_workloads.chatter", vote_bytes=vote_bytes, **options
        ) as ranks:
            statuses = ended(ranks)
            if statuses != [-9 if rank == options["rank"] else 0 for rank in range(WORLD)]:
                return [f"{options} ended with {statuses}", *(rank.account() for rank in ranks)]
            ends = [rank.result() for rank in ranks if rank.number != options["rank"]]
            return [f"{options} told {end}" for end in ends if len(end) != 3 or len({*end}) != 1]

    assert_none_wrong(launchers, tmp_path, list(range(seed, seed + times)), told)


FAULTS = [
    *((0, place, "no_space") for place in ("before begin", "before write", "before settle", "before commit")),
    *((1, place, "no_space") for place in ("before join", "before write", "after write", "before settle")),
    *((2, place, "io_error") for place in ("before sync", "after settle")),
    *((0, place, "io_error") for place in ("before sync", "before rename")),
]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=LONG)])
def test_a_rank_that_cannot_write_costs_at_most_one_checkpoint(
    launchers: list[RankLauncher], fast_path: Path, undisturbed: States, step: int
) -> None:
    def failed(launcher: RankLauncher, root: Path, case: Any) -> list[str]:
        rank, place, spring = case
        options = {"phase": "checkpoint", "rank": rank, "place": place, "spring": spring}
        with started(launcher, root, until=16, **options) as ranks:
            if (statuses := ended(ranks)) != [0] * WORLD:
                return [f"ended with {statuses}", *(each.account() for each in ranks)]
            told = [line for each in ranks for line in each.said("notice ")]
            found = [f"told {line}" for each in ranks for line in each.said("fault ")]
            where = "" if rank == 0 else f"rank {rank}: "
            failed_with = f"job: {where}{'No space left' if spring == 'no_space' else 'Input/output error'}"
            # a full store makes room and writes again, unless the ranks have not begun
            if len(told) != 1 or not (failed_with in told[0] or (spring == "no_space" and "is full" in told[0])):
                found.append(f"told {told}")
            heads = {head for each in ranks for head in each.said("head ")}
            if heads != {"000000000016-1"}:
                found.append(f"the last checkpoints are {heads}")
            found += different(ranks, undisturbed)
        return [*found, *violations(root, [], leftovers_allowed=0), *not_whole(root)]

    assert_none_wrong(launchers, fast_path, every_other(FAULTS, step), failed)


STOPS = [(0, "before begin"), (0, "before commit"), (0, "after rename"), (1, "after receive begun"),
         (1, "before sync"), (2, "after send vote")]  # fmt: skip


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=LONG)])
def test_a_rank_that_stops_for_a_while_is_waited_for(
    launchers: list[RankLauncher], fast_path: Path, undisturbed: States, step: int
) -> None:
    def stopped(launcher: RankLauncher, root: Path, case: tuple[int, str]) -> list[str]:
        rank, place = case
        options = {"phase": "checkpoint", "rank": rank, "place": place, "spring": "stop"}
        with started(launcher, root, until=16, **options) as ranks:
            ranks[rank].hear("stopping")
            while Path(f"/proc/{ranks[rank].pid}/stat").read_text().rpartition(") ")[2][0] != "T":
                pass
            ranks[rank].kill(signal.SIGCONT)
            if (statuses := ended(ranks)) != [0] * WORLD:
                return [f"ended with {statuses}", *(each.account() for each in ranks)]
            found = [f"told {line}" for each in ranks for line in each.said("notice ")]
            found += different(ranks, undisturbed)
        return [*found, *goes_on(launcher, root, undisturbed)]

    assert_none_wrong(launchers, fast_path, every_other(STOPS, step), stopped)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_ranks_that_are_all_told_to_end_do(
    launchers: list[RankLauncher], tmp_path: Path, undisturbed: States, number: int, status: int
) -> None:
    with started(launchers[0], tmp_path, until=16, ready_at=9) as ranks:
        for rank in ranks:
            rank.hear("ready")
        for rank in ranks:
            rank.kill(number)
        assert ended(ranks) == [status] * WORLD
        assert not [line for rank in ranks for line in rank.said("fault ")]
    assert goes_on(launchers[0], tmp_path, undisturbed) == []


@pytest.mark.parametrize("number", range(WORLD))
def test_a_rank_whose_loop_raises_ends_and_the_others_train_on(
    launchers: list[RankLauncher], tmp_path: Path, undisturbed: States, number: int
) -> None:
    options = {"phase": "loop", "rank": number, "spring": "raise_in_loop", "arm_after": 7}
    with started(launchers[0], tmp_path, until=16, **options) as ranks:
        assert ended(ranks) == [1 if rank == number else 0 for rank in range(WORLD)]
        for rank in ranks:
            told = sum(LOST in line for line in rank.said("notice "))
            assert (told, rank.said("fault ")) == (0 if rank.number == number else 1, []), rank.account()
    assert goes_on(launchers[0], tmp_path, undisturbed) == []


@pytest.mark.parametrize("phase", ["early", "twice"])
@pytest.mark.parametrize("number", range(WORLD))
def test_ranks_that_do_not_step_equally_often_are_told_and_end(
    launchers: list[RankLauncher], tmp_path: Path, undisturbed: States, phase: str, number: int
) -> None:
    with started(launchers[0], tmp_path, until=16, phase=phase, rank=number) as ranks:
        assert ended(ranks) == [0] * WORLD
        assert not [line for rank in ranks for line in rank.said("fault ")]
        assert [line for rank in ranks for line in rank.said("notice ") if "equally often" in line]


def test_a_script_may_destroy_its_process_group_before_the_session_ends(
    launchers: list[RankLauncher], tmp_path: Path, undisturbed: States
) -> None:
    with started(launchers[0], tmp_path, until=16, phase="destroyed") as ranks:
        assert ended(ranks) == [0] * WORLD
        assert [rank.said("head ") for rank in ranks] == [["000000000016-1"]] * WORLD
        assert not [line for rank in ranks for line in rank.said("notice ")]
