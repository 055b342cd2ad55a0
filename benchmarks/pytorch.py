"""The models that `recurrence.py` is measured against, as one writes them in PyTorch.

Axes: T time, B batch, H hidden, K rank, V vocabulary. Tokens are [T, B].
"""

import torch
from torch import nn


class MogrifierLSTM(nn.Module):
    """One layer: `nn.LSTMCell` behind low-rank gating, in a loop over time."""

    def __init__(self, hidden_size: int, rounds: int, rank: int):
        super().__init__()
        self.cell = nn.LSTMCell(hidden_size, hidden_size)
        self.down = nn.ModuleList(nn.Linear(hidden_size, rank, bias=False) for _ in range(rounds))
        self.up = nn.ModuleList(nn.Linear(rank, hidden_size) for _ in range(rounds))

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        """[T, B, H] to [T, B, H], from a zero state."""
        h, c = torch.zeros_like(xs[0]), torch.zeros_like(xs[0])
        hs = []
        for x in xs:
            for i, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
                if i % 2:
                    h = 2 * torch.sigmoid(up(down(x))) * h
                else:
                    x = 2 * torch.sigmoid(up(down(h))) * x
            h, c = self.cell(x, (h, c))
            hs.append(h)
        return torch.stack(hs)


class LSTM(nn.LSTM):
    """One layer of the fused LSTM, outputs only."""

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        """[T, B, H] to [T, B, H], from a zero state."""
        return super().forward(xs)[0]


class LanguageModel(nn.Module):
    """Embedding, layers, tied softmax."""

    def __init__(self, vocab_size: int, hidden_size: int, layers: list[nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(hidden_size, vocab_size)
        self.output.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss: nats summed over time, mean over the batch."""
        logits = self.output(self.layers(self.embedding(inputs)))
        nats = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return nats / inputs.shape[1]


def make_layers(num_layers: int, hidden_size: int, rounds: int, rank: int) -> list[nn.Module]:
    """Mogrifier layers, or for 0 rounds the fused LSTM."""
    if rounds == 0:
        return [LSTM(hidden_size, hidden_size) for _ in range(num_layers)]
    return [MogrifierLSTM(hidden_size, rounds, rank) for _ in range(num_layers)]
