"""The codecs: what goes in comes back within the tolerance, whatever it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast_series import Autoencoder, Codec, Half, Raw, SeriesStore, StreamingPCA, Sz3, Zfp
from holdfast_series.blocks import from_blocks, to_blocks
from holdfast_series.codecs import HALF_TOLERANCE, StateFormat

SHAPES = [(), (1,), (7,), (64,), (200,), (8, 8), (5, 13), (3, 17, 9), (2, 2, 8, 16), (1, 40), (0, 4)]


def smooth(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Waves along the last two dimensions."""
    places = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    return torch.sin(0.05 * places + seed) * (1 + 0.2 * seed)


def trained(codec: StreamingPCA | Autoencoder) -> Codec:
    codec.fit([smooth((40, 48), seed) for seed in range(6)])
    return codec


@pytest.fixture(scope="module")
def codecs() -> dict[str, Codec]:
    learned = [trained(StreamingPCA(2e-2, latents=12)), trained(Autoencoder(2e-2, hidden=8, iterations=20))]
    return {codec.name: codec for codec in (Raw(), Half(), Zfp(1e-3), Sz3(1e-3), *learned)}


NAMES = ["raw", "half", "zfp", "sz3", "pca", "autoencoder"]


def check(codec: Codec, state: Tensor) -> SeriesStore:
    """Put a state and compare what comes back: within the tolerance if there is one, else to the bit."""
    store = SeriesStore(codec=codec)
    store.put(0, state)
    back = store.get(0)
    assert (back.shape, back.dtype, back.device) == (state.shape, state.dtype, state.device)
    if store.report().exact or store.report().raw_fallbacks:
        assert torch.equal(
            back.contiguous().view(-1).view(torch.uint8), state.contiguous().view(-1).view(torch.uint8)
        )
    else:
        error = (back.double() - state.double()).abs()
        assert not state.numel() or float(error.max()) <= codec.tolerance * float(state.double().abs().max())
    return store


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_states_come_back_within_the_tolerance(
    codecs: dict[str, Codec], name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    check(codecs[name], smooth(shape, 1).to(dtype)).close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128])
def test_other_types_are_stored_exactly(codecs: dict[str, Codec], name: str, dtype: torch.dtype) -> None:
    with check(codecs[name], (100 * smooth((9, 12))).to(dtype)) as store:
        assert store.report().exact == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_state_need_not_be_contiguous(codecs: dict[str, Codec], name: str) -> None:
    check(codecs[name], smooth((24, 32), 2).float().T[::2]).close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_are_stored_exactly(codecs: dict[str, Codec], name: str, bad: float) -> None:
    state = smooth((16, 16)).float()
    state[3, 4] = bad
    with check(codecs[name], state) as store:
        assert store.report().exact == 1


@st.composite
def fields(draw: st.DrawFn) -> Tensor:
    """Random, smooth, constant and spiky fields of any magnitude, denormal numbers among them."""
    shape = draw(st.sampled_from([(50,), (16, 24), (3, 11, 9)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    kind = draw(st.sampled_from(["noise", "smooth", "constant", "spike", "mixed"]))
    field = {
        "noise": noise,
        "smooth": smooth(shape),
        "constant": torch.full(shape, 0.3, dtype=torch.float64),
        "spike": smooth(shape) * 1e-3 + (noise > 2.5) * 1e3,
        "mixed": noise * 10 ** (3 * torch.randn(shape, dtype=torch.float64, generator=generator)),
    }[kind]
    exponent = draw(st.integers(-44, 37) if dtype == torch.float32 else st.integers(-320, 300))
    field = (field * 10.0**exponent if exponent > -300 else field * 1e-300 * 10.0 ** (exponent + 300)).to(dtype)
    if draw(st.integers(0, 9)) == 0:
        field.view(-1)[draw(st.integers(0, field.numel() - 1))] = draw(st.sampled_from([math.nan, math.inf]))
    return field


@settings(max_examples=60)
@given(field=fields())
@pytest.mark.parametrize("name", NAMES)
def test_no_element_is_off_by_more_than_the_tolerance(codecs: dict[str, Codec], name: str, field: Tensor) -> None:
    check(codecs[name], field).close()


def test_noise_falls_back_to_half_precision_and_then_to_raw(codecs: dict[str, Codec]) -> None:
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with check(codecs["pca"], noise) as store:
        assert (store.report().half_fallbacks, store.report().raw_fallbacks) == (1, 0)
        assert store.report().memory_bytes == noise.nbytes / 2
    exact = StreamingPCA(HALF_TOLERANCE / 16)
    exact.fit([smooth((64, 64), seed) for seed in range(3)])
    with check(exact, noise) as store:
        assert (store.report().half_fallbacks, store.report().raw_fallbacks) == (0, 1)
    with check(codecs["pca"], noise.bfloat16()) as store:
        assert (store.report().half_fallbacks, store.report().raw_fallbacks) == (0, 1)


def test_a_few_elements_that_miss_the_tolerance_are_corrected(codecs: dict[str, Codec]) -> None:
    state = smooth((40, 48), 3).float()
    state[11, 7] += 1.5
    state[35, 40] -= 0.5
    for name in ("pca", "autoencoder"):
        with check(codecs[name], state) as store:
            report = store.report()
            assert (report.corrected, report.half_fallbacks) == (1, 0)
            assert report.memory_bytes < state.nbytes / 4


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape)])
def test_blocks_are_a_reversible_view(shape: tuple[int, ...]) -> None:
    state = smooth(shape).float()
    assert torch.equal(from_blocks(to_blocks(state), state.shape), state)


def test_a_codec_learns_from_the_first_states() -> None:
    codec = Autoencoder(3e-2, hidden=8, train_states=4, iterations=10)
    with SeriesStore(codec=codec) as store:
        for step in range(6):
            store.put(step, smooth((32, 32), step).float())
        report = store.report()
        assert (report.learned_from, report.puts) == (4, 6)
        assert report.training_seconds > 0
        assert report.codec_bytes > 0


def test_training_repeats_with_its_seed_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    payloads, state = [], smooth((24, 24), 9)
    for seed in (1, 1, 2):
        codec = Autoencoder(2e-2, hidden=8, iterations=10, seed=seed)
        codec.fit([smooth((24, 24), number) for number in range(4)])
        payloads.append(codec.encode(state, StateFormat(state.shape, state.dtype)))
    assert payloads[0] == payloads[1] != payloads[2]
    assert torch.equal(torch.get_rng_state(), before)


def front(radius: float) -> Tensor:
    """A ring that moves outward, as a wave does."""
    row, column = torch.meshgrid(*(torch.arange(64.0),) * 2, indexing="ij")
    distance = ((row**2 + column**2).sqrt() - radius) / 3
    return (1 - 2 * distance**2) * torch.exp(-(distance**2))


def test_training_lowers_the_error_of_the_principal_components() -> None:
    states = [front(10 + 4.0 * number) for number in range(12)]
    errors = []
    for codec in (StreamingPCA(3e-2, latents=4), Autoencoder(3e-2, latents=4, hidden=16, iterations=60)):
        codec.fit(states[::2])
        blocks = torch.cat([to_blocks((state / state.abs().max()).float()) for state in states[1::2]])
        errors.append(float((codec.synthesize(codec.analyze(blocks)) - blocks).square().mean()))
    assert errors[1] < errors[0]


def test_a_codec_learns_once() -> None:
    codec = StreamingPCA()
    with pytest.raises(ValueError, match="at least one state"):
        codec.fit([torch.zeros(8, 8)])
    codec.fit([smooth((8, 8))])
    with pytest.raises(ValueError, match="codec 'pca' has already learned"):
        codec.fit([smooth((8, 8))])


def test_arguments_without_a_meaning_are_refused() -> None:
    for tolerance in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="tolerance="):
            Zfp(tolerance)
    with pytest.raises(ValueError, match="latents=65 must be 1 to 64"):
        StreamingPCA(latents=65)
    with pytest.raises(ValueError, match="train_states=0"):
        Autoencoder(train_states=0)
