"""A store of the forward states of a solver, for adjoints, which read them newest first.

    with SeriesStore(codec=Zfp(1e-2), memory="2GB", store="/scratch") as states:
        for step in range(steps):
            states.put(step, forward(step))
        for step, state in reversed(states):
            adjoint(step, state)

Every lossy state is decoded when it is stored, and one that misses its tolerance is stored in another way. This is
no checkpoint: nothing outlives the process.
"""

from __future__ import annotations

from holdfast_series.autoencoder import Autoencoder
from holdfast_series.blocks import StreamingPCA
from holdfast_series.codecs import Codec, Half, Raw, Sz3, Zfp
from holdfast_series.store import NoSuchStep, SeriesReport, SeriesStore, SeriesStoreClosed, SeriesStoreFull

__all__ = [
    "Autoencoder",
    "Codec",
    "Half",
    "NoSuchStep",
    "Raw",
    "SeriesReport",
    "SeriesStore",
    "SeriesStoreClosed",
    "SeriesStoreFull",
    "StreamingPCA",
    "Sz3",
    "Zfp",
]
