"""The other side of `torch_step`, for a Python with torch: ResNet-18 for 32x32 images.

It takes a training step whenever a line comes in, and answers with its seconds.
"""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512)


def conv_norm(c_in: int, c_out: int, size: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out))


class Block(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.first = conv_norm(c_in, c_out, 3, stride)
        self.second = conv_norm(c_out, c_out, 3, 1)
        projects = stride != 1 or c_in != c_out
        self.shortcut = conv_norm(c_in, c_out, 1, stride) if projects else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(functional.relu(self.first(x), inplace=True))
        return functional.relu(y + self.shortcut(x), inplace=True)


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 64, 3, 1), nn.ReLU(inplace=True)]
    c_in = 64
    for stage, width in enumerate(WIDTHS):
        for index in range(2):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(Block(c_in, width, stride))
            c_in = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, 10))
    return nn.Sequential(*layers, *head)


def main() -> None:
    batch_size, layout = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    model = resnet18().to(memory_format=memory)
    images = torch.randn(batch_size, 3, 32, 32).to(memory_format=memory)
    labels = torch.randint(0, 10, (batch_size,))
    optimizer = torch.optim.SGD(
        model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    num_params = sum(p.numel() for p in model.parameters())
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {layout}"
    answer(about=about, params=num_params)
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        answer(seconds=time.perf_counter() - start)


def answer(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
