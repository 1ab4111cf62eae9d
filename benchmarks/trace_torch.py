"""The other side of `benchmark_trace`, for a Python with torch and torch-pruning.

It builds the dependency graph of ResNet-152 whenever a line comes in, and answers with
the seconds that took. The network is torchvision's, written out here because its
package needs a build that fits torch.
"""

import gc
import json
import sys
import time
from importlib.metadata import version

import torch
import torch_pruning
from torch import nn

STAGES = ((3, 64), (8, 128), (36, 256), (3, 512))


class Bottleneck(nn.Module):
    def __init__(self, c_in: int, width: int, stride: int, projects: bool):
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(c_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if projects:
            conv = nn.Conv2d(c_in, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += side
        return self.relu(y)


class ResNet152(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, stream = [], 64
        for number, (count, width) in enumerate(STAGES):
            blocks = []
            for index in range(count):
                stride = 2 if number > 0 and index == 0 else 1
                blocks.append(Bottleneck(stream, width, stride, index == 0))
                stream = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.layers = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(stream, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def main() -> None:
    side = int(sys.argv[1])
    model = ResNet152().eval()
    example = torch.randn(1, 3, side, side)
    answer(
        params=sum(p.numel() for p in model.parameters()),
        versions=f"torch {version('torch')}, torch-pruning {version('torch-pruning')}, "
        f"{torch.get_num_threads()} threads",
    )
    gc.disable()
    for _ in sys.stdin:
        gc.collect()
        start = time.perf_counter()
        graph = torch_pruning.DependencyGraph()
        graph.build_dependency(model, example_inputs=example)
        built = time.perf_counter()
        groups = list(graph.get_all_groups())
        listed = time.perf_counter()
        answer(graph=built - start, groups=listed - built, count=len(groups))


def answer(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
