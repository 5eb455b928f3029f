"""Datasets that expose how a loader has read them."""

import random

import numpy
import torch
from torch.utils.data import Dataset


class RandomNumberDataset(Dataset):
    """Samples that carry their index and random numbers from every generator in use."""

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, random.random(), numpy.random.rand(), torch.rand(1).item()


class IndexRecordingDataset(Dataset):
    """Records each index that is read."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


def epoch(loader):
    return [tuple(map(tuple, (c.tolist() for c in batch))) for batch in loader]


def indices(loader):
    """Of every batch of an epoch of a `IndexRecordingDataset`."""
    return [batch.tolist() for batch in loader]


def random_states():
    _, words, *rest = numpy.random.get_state()
    return random.getstate(), words.tolist(), rest, torch.get_rng_state().tolist()
