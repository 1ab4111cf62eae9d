"""A small network of PyTorch for the images of digits; imports torch."""

import torch
from torch import nn


class DigitsNet(nn.Module):
    """Batch statistics, a depthwise convolution, dropout, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.two = nn.Conv2d(16, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(256, 10)

    def forward(self, images):
        # Channels first, for any batch; there is one.
        x = images.permute(0, 3, 1, 2)
        x = torch.relu(self.norm(self.one(x)))
        x = nn.functional.max_pool2d(self.two(self.each(x)), 2)
        return self.out(self.dropout(torch.relu(x).flatten(1)))


torch.manual_seed(0)
# As settings name it.
NETWORK = DigitsNet()
