"""Makes a function of fewer channels by doing its traced program again on less.

The function is traced at full size, whatever framework wrote it, and every operation is
done with what is left of its operands. So the smaller function divides by the numbers
the old one divided by, and nothing in it can depend on how many channels are left.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.jaxprs import is_of_mesh
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import TraceOptions
from prunex_jax.channels.resolve import Resolution, resolve
from prunex_jax.channels.trace import Labelled, label_function
from prunex_jax.mesh.varying import differs, untyped
from prunex_jax.shrink.evaluator import Evaluator
from prunex_jax.shrink.part import Part
from prunex_jax.shrink.rebuild import REBUILDS


def shrink_function(
    apply: Callable[..., Any],
    parameters: Part,
    statistics: Part | None,
    options: TraceOptions,
) -> Callable[..., Any]:
    """Makes the function of what is left; see `Cut.function`."""
    rebuilds = {**REBUILDS, **(options.rebuilds or {})}

    def small(params: PyTree, *rest: Any) -> Any:
        if not differs((params, rest)):
            return run(params, *rest)
        # Where `shard_map` runs eagerly, no constant can be computed in it.
        compiled = jax.jit(run)
        if communicates(params, *rest):
            return compiled(params, *rest)
        # Constants have no types of a mesh, and need none.
        return untyped(compiled)(params, *rest)

    def communicates(params: PyTree, *rest: Any) -> bool:
        full = parameters.full(params)
        if statistics is not None:
            rest = (statistics.full(rest[0]), *rest[1:])
        plain = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (full, *rest)
        )
        return is_of_mesh(jax.make_jaxpr(apply)(*plain))

    def run(params: PyTree, *rest: Any) -> Any:
        running, inputs = None, rest
        if statistics is not None:
            running, inputs = statistics.full(rest[0]), rest[1:]
        given = jax.tree.map(jax.typeof, inputs)
        full = parameters.full(params)
        found = label_function(
            apply, full, given, running, options, with_jax_derivatives=True
        )
        resolution = _resolve(found, parameters, statistics, options)
        evaluator = Evaluator(resolution, rebuilds, found.table)
        values = jax.tree.leaves((params, *rest))
        return jax.tree.unflatten(found.outputs, evaluator.run(found.program, values))

    return small


def _resolve(
    found: Labelled,
    parameters: Part,
    statistics: Part | None,
    options: TraceOptions,
) -> Resolution:
    status = np.zeros(found.table.num_labels, np.int8)
    parameters.tell(status, found.weights)
    if statistics is not None:
        statistics.tell(status, found.running)
    resolution = resolve(found.table, status, options.factors)
    conflict = resolution.conflict()
    if conflict is not None:
        raise UserError(
            f"a channel that is dead by its mask cannot be cut out of this function: "
            f"{conflict}; trace the channels of this very function"
        )
    return resolution
