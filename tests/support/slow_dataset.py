"""A dataset whose reads take a known time, split into fetching and preparing."""

import torch
from torch.utils.data import Dataset


class SlowDataset(Dataset):
    def __init__(self, size, wait, *, fetch=0.0, prep=0.0):
        """`fetch`, `prep`: seconds a sample."""
        self.wait, self.fetch, self.prep = wait, fetch, prep
        self.reads = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        if not self.reads[index]:
            self.wait(self.fetch)
        self.reads[index] += 1
        self.wait(self.prep)
        return index
