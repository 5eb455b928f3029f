import random

import numpy
import torch

from holdfast.rng import restore_rng, rng_state


def test_random_state_comes_back():
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item(), numpy.random.normal()

    draw()
    state = rng_state()
    first = draw()
    restore_rng(state)
    assert draw() == first
