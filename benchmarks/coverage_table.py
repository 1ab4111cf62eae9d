"""Prints how much of each network of the zoo can be pruned, as a Markdown table.

Networks have their published sizes. Only shapes are traced, no array is made but those
that Equinox modules hold as fields.

    python -m benchmarks coverage_table > build/coverage.md
    mv build/coverage.md docs/coverage.md

Shares in 0.1 are taken over from the table that is there.
"""

import collections
import dataclasses
import importlib.util
import math
import pathlib
import sys
import time
from collections.abc import Sequence

from prunex_jax.channels import ChannelSlice, ChannelTrace
from tests.helpers.zoo import NETWORKS, PUBLISHED, Network

HEAD = """\
# How much of a network can be pruned

For networks of published size, as their authors wrote them: the share of the
parameters that can go, and why the rest stays. A matrix counts by axis: a half where
one of its axes can be cut and the other one stays for no reason that every network has,
as inputs, outputs, windows and rows of tables are. Made by
`python -m benchmarks coverage_table`; `tests/helpers/zoo` holds the networks.

Layer norm sums over channels. Dead ones are zeros in its mean, and all of them are
minus the mean once it is subtracted; that value is computed beside the kept channels,
so that they can be removed without changing the function. In 0.1 they stayed.

*Inner* is the share of entries that lie in groups inside of a block: all that may go
where `sparsity.scope=inner` leaves what shortcuts add up as it is, such as the stream
of a transformer. *Source* is where the network's code lies: in this package, in its
tests, or in another package. *In 0.1* is what version 0.1 could prune of it, where it
had the network, by entries. Seconds are those of one trace on a CPU, which may have had
other work.
"""
COLUMNS = (
    "network",
    "framework",
    "source",
    "parameters",
    "prunable",
    "inner",
    "in 0.1",
    "groups",
    "channels",
    "what stays, and why",
    "seconds",
)
_MAX_REASONS = 2
TABLE = pathlib.Path(__file__).parents[1] / "docs" / "coverage.md"


def main() -> None:
    """Prints the table; says on stderr which packages are missing."""
    print(HEAD)  # noqa: T201
    print(row_of(COLUMNS))  # noqa: T201
    print(row_of(["---"] * len(COLUMNS)))  # noqa: T201
    earlier = earlier_shares(TABLE.read_text())
    for network in NETWORKS:
        missing = [name for name in network.needs if not importlib.util.find_spec(name)]
        if missing:
            sys.stderr.write(f"{network.name} left out: install {missing[0]}\n")
            continue
        share = earlier.get(network.name, "-")
        print(row_of(measure(network, share)), flush=True)  # noqa: T201


def earlier_shares(table: str) -> dict[str, str]:
    """Prunable shares in 0.1 by name of the network."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "|" in line]
    return {row[0]: dict(zip(rows[0], row, strict=True))["in 0.1"] for row in rows[2:]}


def row_of(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def measure(network: Network, earlier: str) -> list[str]:
    """Traces one network; `earlier` is its prunable share in 0.1."""
    case = network.build(PUBLISHED)
    start = time.perf_counter()
    trace = case.trace()
    seconds = time.perf_counter() - start
    count = sum(map(math.prod, trace.shapes.values()))
    return [
        network.name,
        network.framework,
        network.source,
        f"{count / 1e6:.1f} M",
        f"{100 * trace.prunable_share():.1f} %",
        f"{100 * inner_share(trace):.1f} %",
        earlier,
        str(len(trace.groups)),
        str(sum(group.size for group in trace.groups)),
        what_stays(trace),
        f"{seconds:.1f}",
    ]


def inner_share(trace: ChannelTrace) -> float:
    """Share of the entries that lie in some group inside of a block."""
    inner = tuple(group for group in trace.groups if group.is_inner)
    left = left_by_path(dataclasses.replace(trace, groups=inner))
    total = sum(map(math.prod, trace.shapes.values()))
    return 1 - sum(left.values()) / max(total, 1)


def what_stays(trace: ChannelTrace) -> str:
    """The reasons that keep most parameters, with their share and one parameter.

    What stays in every network counts where nothing of a parameter can go.
    """
    total = sum(map(math.prod, trace.shapes.values()))
    touched = {member.path for group in trace.groups for member in group.members}
    kept: collections.Counter[str] = collections.Counter()
    largest: dict[str, tuple[float, str]] = {}
    for staying in trace.frozen:
        reason = staying.reason
        text = f"{reason.primitive}: {reason.text}" if reason.primitive else reason.text
        for member in staying.members:
            if not (reason.is_inherent and member.path in touched):
                count = count_of(trace.shapes[member.path], member)
                kept[text] += count
                largest[text] = max(largest.get(text, (0.0, "")), (count, member.path))
    parts = [
        f"{100 * count / total:.1f} %, such as `{largest[text][1]}`: {text}"
        for text, count in kept.most_common(_MAX_REASONS)
        if count / total >= 5e-4
    ]
    return "; ".join(parts) or "under 0.05 %, the last biases"


def count_of(shape: tuple[int, ...], member: ChannelSlice) -> float:
    """The part of a parameter that some positions of one axis are."""
    wide = sum(size > 1 for size in shape)
    share = member.positions.size / shape[member.axis]
    return math.prod(shape) * share / wide if shape[member.axis] > 1 else 0.0


def left_by_path(trace: ChannelTrace) -> dict[str, int]:
    """Number of entries of each parameter that no group owns."""
    free = {path: list(shape) for path, shape in trace.shapes.items()}
    for group in trace.groups:
        for member in group.members:
            free[member.path][member.axis] -= member.positions.size
    return {path: math.prod(sizes) for path, sizes in free.items()}


if __name__ == "__main__":
    main()
