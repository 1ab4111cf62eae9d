"""What a trained network keeps when channels go at once and nothing trains after it.

Scores the network of a run on its validation split: whole, with channels set to zero,
the same with batch statistics of its own, and repaired. Prints a table.

    python -m benchmarks one_shot --workdir=RUN [--data-dir=FOLDER] [--examples=1024]
        [--unit=channels] [--budget=uniform] [--criterion=norm] [--shares 0.3 0.5]

The last four are as in `config.sparsity`; scores of gradients are means over batches of
training examples, of a network that trains no more.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelTrace
from prunex_jax.data import evaluation_batches
from prunex_jax.models import Model
from prunex_jax.pruner.networks import FullNetwork
from prunex_jax.pruner.ranking import scores_of
from prunex_jax.shrink import make_cut, repair, trace_model
from prunex_jax.shrink.cost import macs_cost, model_budget, size_costs
from prunex_jax.sparsity import (
    choose_keep_indices,
    masks_of,
    uses_gradients,
    validate_sparsity,
)
from prunex_jax.sparsity.settings import Criterion, SparsityConfig
from prunex_jax.tasks import Batch, Sums
from prunex_jax.train.records.restoring import TrainedNetwork, load_trained
from prunex_jax.train.records.scores import measured

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
# What scores of gradients are means over.
_BATCHES, _BATCH_SIZE = 40, 64
# Examples that are scored at once.
_SCORED = 256


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True, help="folder of a run that ended")
    parser.add_argument("--data-dir", default="", help="if not where it found the data")
    parser.add_argument("--examples", type=int, default=1024, help="to fit on")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--ridge", type=float, default=1e-3)
    for name in ("unit", "budget", "criterion"):
        parser.add_argument(f"--{name}", default=getattr(SparsityConfig(), name))
    given = parser.parse_args()
    config = SparsityConfig(
        unit=given.unit, budget=given.budget, criterion=given.criterion
    )
    validate_sparsity(config)
    found = load_trained(given.workdir, data_dir=given.data_dir, simulates=True)
    for row in rows_of(found, config, given.shares, given.examples, given.ridge):
        sys.stdout.write(" | ".join(["", *row, ""]).strip() + "\n")
        sys.stdout.flush()


def rows_of(
    found: TrainedNetwork,
    config: SparsityConfig,
    shares: Iterable[float],
    num_examples: int,
    ridge: float,
) -> Iterable[list[str]]:
    """Head and rows of the table."""
    network, model = found.masked, found.masked.model
    params, statistics = network.params, network.statistics
    program = jax.jit(functools.partial(_sums, found, model))
    score = functools.partial(_score, found, program)
    inputs = _examples(found, num_examples)
    yield [
        *(f"{config.unit} removed", "parameters", "multiply-accumulates"),
        *("set to zero", "own statistics", "repaired", "and own statistics"),
        "seconds to repair",
    ]
    yield ["---"] * 8
    yield ["none", "1", "1", score(params, statistics), "", "", "", ""]
    trace = trace_model(model)
    budget = model_budget(config, model, trace)
    scores = _scores(found, config.criterion, trace)
    sizes = {group.name: group.size for group in trace.groups}
    example = model.example()
    macs = macs_cost(model.apply, trace, params, example, statistics=statistics)
    costs = size_costs(trace)["params"], macs
    for share in shares:
        counts = budget.keep_counts_at(1 - share, scores)
        kept = choose_keep_indices(scores, counts)
        cut = make_cut(trace, masks_of(kept, sizes), params, statistics)
        masked = cut.mask(params)
        own = functools.partial(_own_statistics, model, statistics, inputs)
        began = time.perf_counter()
        fitted = jax.block_until_ready(
            repair(model.apply, params, cut, inputs, statistics=statistics, ridge=ridge)
        )
        seconds = time.perf_counter() - began
        yield [
            f"{share:.0%}",
            *(f"{cost(counts) / cost(sizes):.3f}" for cost in costs),
            score(masked, statistics),
            score(masked, own(masked)),
            score(fitted, statistics),
            score(fitted, own(fitted)),
            f"{seconds:.0f}",
        ]


def _sums(
    found: TrainedNetwork,
    model: Model,
    params: PyTree,
    statistics: PyTree,
    batch: Batch,
) -> Sums:
    """What the task adds up over a batch."""
    objective = found.task.objective
    outputs = model.apply(params, statistics, objective.inputs(batch))
    return objective.score(outputs, batch)


def _score(
    found: TrainedNetwork,
    program: Callable[..., Sums],
    params: PyTree,
    statistics: PyTree,
) -> str:
    """Accuracy on the validation split; of tasks without one, the loss."""
    split, rows = found.task.dataset.validation, np.arange(_SCORED)
    with evaluation_batches(split, _SCORED, rows) as batches:
        sums = (program(params, statistics, batch) for batch in batches)
        measures = measured(found.task.objective, sums)
    if measures is None:
        sys.exit("error: this run has no validation split; set data.validation_share")
    return f"{measures.get('accuracy', measures['loss']):.4f}"


def _examples(found: TrainedNetwork, count: int) -> PyTree:
    """Inputs of training examples."""
    return found.task.objective.inputs(_batch(found, count, seed=0))


def _batch(found: TrainedNetwork, count: int, seed: int) -> Batch:
    """Training examples drawn at random."""
    split = found.task.dataset.train
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(len(split), min(count, len(split)), replace=False))
    with evaluation_batches(split, len(rows), rows) as batches:
        return jax.tree.map(jnp.asarray, next(batches))


def _scores(
    found: TrainedNetwork, criterion: Criterion, trace: ChannelTrace
) -> dict[str, np.ndarray]:
    """Scores of all channels; of gradients, means over batches."""
    network, objective = found.masked, found.task.objective
    params, statistics = network.params, network.statistics
    numbers = range(_BATCHES if uses_gradients(criterion) else 0)
    drawn = (_batch(found, _BATCH_SIZE, seed=1 + number) for number in numbers)
    batches = [(objective.inputs(batch), batch) for batch in drawn]
    full = FullNetwork(
        network.model.apply, params, statistics, (network.model.example(),)
    )
    return scores_of(
        criterion, full, params, statistics, trace, objective.loss, batches, seed=0
    )


def _own_statistics(
    model: Model, statistics: PyTree, inputs: PyTree, params: PyTree
) -> PyTree:
    return jax.jit(model.reestimate)(params, statistics, inputs, jnp.int32(0))


if __name__ == "__main__":
    main()
