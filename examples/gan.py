"""Two competing networks: `gan_plain.py`, made resumable by six lines.

One learns to draw points on a ring of eight clusters, the other to distinguish them from real ones. No download.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

import holdfast

EPOCHS, BATCH, LATENT = 30, 64, 8


class Ring(Dataset[Tensor]):
    """Points around eight centers, redrawn every epoch."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Tensor:
        angle = 2 * math.pi * (index % 8) / 8
        return torch.tensor([math.cos(angle), math.sin(angle)]) + 0.05 * torch.randn(2)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, outputs))  # fmt: skip


def train() -> nn.Module:
    torch.manual_seed(0)
    artist, critic = network(LATENT, 2), network(2, 1)
    opt_a = torch.optim.Adam(artist.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    z = torch.Generator().manual_seed(1)
    loader = holdfast.DataLoader(Ring(), batch_size=BATCH, shuffle=True)
    session = holdfast.Session("gan", artist=artist, critic=critic, opt_a=opt_a, opt_c=opt_c, z=z, loader=loader)
    session.resume()

    for epoch in range(loader.epoch, EPOCHS):
        for real in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = artist(torch.randn(len(real), LATENT, generator=z))

            opt_c.zero_grad()
            critic_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
            critic_loss += F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
            critic_loss.backward()
            opt_c.step()

            opt_a.zero_grad()
            artist_loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
            artist_loss.backward()
            opt_a.step()
            session.step(critic=critic_loss, artist=artist_loss)
        with torch.no_grad():
            drawn = artist(torch.randn(500, LATENT, generator=z))
        print(f"epoch {epoch + 1}: {(drawn.norm(dim=1) - 1).abs().mean():.3f} away from the ring", flush=True)
    return artist


if __name__ == "__main__":
    train()
