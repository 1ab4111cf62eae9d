"""A smaller network, and what it was made of."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path, named_by
from prunex_jax.channels import ChannelTrace
from prunex_jax.export import export_model
from prunex_jax.pruner.networks import FullNetwork, trees_of
from prunex_jax.pruner.optimizers import follows_masked
from prunex_jax.shrink import Certificate, Cut
from prunex_jax.shrink.cost import count_macs, count_params

# Groups that a table lists.
_MAX_ROWS = 16
_NOT_FOLLOWED = (
    "this optimizer looks at the shape of whole arrays, or draws noise: it goes on by "
    "the smaller shapes, which suits the small network, and does not follow the masked "
    "one step by step, as sgd, adam, adamw and lion do"
)


@dataclasses.dataclass(eq=False)
class Pruned:
    """A smaller network; call it with its inputs, and print it for a summary.

    It computes what the network computes whose channels are set to zero, to rounding;
    `certificate` says by how much it differs. `params` and `statistics` may be set to
    what training has made of them: `prune_iteratively` and `export` go on with them.

    Attributes:
      apply: The small function, `apply(params, *inputs)`, or `apply(params, statistics,
        *inputs)` where there are statistics. It can be differentiated, vmapped, jitted.
      params: What is left of the parameters.
      statistics: What is left of running statistics; None if there are none.
      trace: The channel groups of the network.
      cut: What is cut out; `cut.take` cuts other trees.
      certificate: How far the small network is from the masked one.
      full: The network itself, as a function of trees of full size.
      previous: What the round before left, of several.
    """

    apply: Callable[..., PyTree]
    params: PyTree
    statistics: PyTree | None
    trace: ChannelTrace
    cut: Cut
    certificate: Certificate
    full: FullNetwork
    previous: "Pruned | None" = None

    def __call__(self, *inputs: PyTree) -> PyTree:
        """What the small network answers; compiled once per shape."""
        return self._compiled(*self._trees, *inputs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., PyTree]:
        return jax.jit(self.apply)

    @property
    def _trees(self) -> tuple[PyTree, ...]:
        return trees_of(self.params, self.statistics)

    @functools.cached_property
    def macs(self) -> tuple[int, int]:
        """Multiply-accumulates of one call with the inputs, before and after."""
        full = self.full
        trees = trees_of(full.params, full.statistics)
        before = count_macs(full.apply, *trees, *full.inputs)
        return before, count_macs(self.apply, *self._trees, *full.inputs)

    @property
    def num_params(self) -> tuple[int, int]:
        """Parameters, before and after."""
        return count_params(self.full.params), count_params(self.params)

    def __str__(self) -> str:
        """What is left, group by group, and how exact it is."""
        names = list(self.cut.masks)
        widths = max((len(name) for name in names[:_MAX_ROWS]), default=0)
        lines = [
            f"{name:<{widths}}  {int(mask.sum()):>6,} of {mask.size:,} channels"
            for name, mask in list(self.cut.masks.items())[:_MAX_ROWS]
        ]
        if len(names) > _MAX_ROWS:
            lines.append(f"and {len(names) - _MAX_ROWS} more groups")
        lines += [
            f"{_quotient(*self.num_params)} parameters, "
            f"{_quotient(*self.macs)} multiply-accumulates",
            "masked and small network differ by at most "
            f"{self.certificate.max_abs_error:.1e}",
        ]
        return "\n".join(lines)

    def optimizer_state(
        self,
        tx: optax.GradientTransformation,
        state: PyTree | None = None,
        anew: bool = False,
    ) -> PyTree:
        """The state with which an optimizer goes on with the small network.

        Its updates are those of the masked network, cut, unless the optimizer looks at
        the shape of whole arrays, as muon does, or draws noise: that is warned of.

        Args:
          tx: The optimizer.
          state: What it has for the network of full size; None for a new one.
          anew: Whether to begin anew what is not shaped like parameters, such as the
            accumulators of sm3; counters are kept.
        Returns:
          The state for `params`.
        Raises:
          UserError: A part of the state is not shaped like parameters, and `anew` is
            not set.
        Example:
          >>> import jax.numpy as jnp
          >>> from prunex_jax import prune
          >>> params = {'in': jnp.ones((3, 16)), 'out': jnp.ones((16, 2))}
          >>> apply = lambda p, x: jnp.tanh(x @ p['in']) @ p['out']
          >>> small = prune(apply, params, jnp.ones((4, 3)), sparsity=0.5)
          >>> tx = optax.adam(1e-3)
          >>> state = small.optimizer_state(tx, tx.init(params))
          >>> state[0].mu['in'].shape
          (3, 8)
        """
        fresh = tx.init(self.params)
        if state is None:
            return fresh
        structure: Any = jax.tree.structure(state)
        if structure != jax.tree.structure(fresh):
            raise UserError(
                "the state is that of another optimizer, or of other parameters; give "
                "what tx.init made and tx.update has returned"
            )
        wanted, taken = flatten_by_path(fresh), self._taken(flatten_by_path(state))
        odd = [path for path, x in taken.items() if np.shape(x) != wanted[path].shape]
        if odd and not anew:
            raise UserError(
                f"{odd[0]} of the optimizer's state, of shape "
                f"{np.shape(taken[odd[0]])}, is not shaped like a parameter and cannot "
                "be cut; anew=True begins such parts anew, and keeps the rest"
            )
        if not odd and not follows_masked(tx, self.params, self.cut):
            warnings.warn(_NOT_FOLLOWED, stacklevel=2)
        taken |= {path: wanted[path] for path in odd}
        return jax.tree.unflatten(structure, list(taken.values()))

    def module(self) -> Any:
        """The small network as a module of PyTorch, if it was one.

        Raises:
          UserError: It was none, or `pytorch.smaller_module` refuses.
        """
        from prunex_jax.pruner.pytorch import smaller_module

        if self.full.module is None:
            raise UserError("this network was no module of PyTorch; call it instead")
        arrays = {**self.params, **(self.statistics or {})}
        full, answers = self.full, self(*self.full.inputs)
        return smaller_module(full.module, [self.cut], arrays, full.inputs, answers)

    def _taken(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state by path, cut where it is shaped like a parameter."""
        shapes = self.cut.parameters.shapes
        before = None if self.previous is None else self.previous.cut
        taken = dict(state)
        for path, leaf in state.items():
            owner = named_by(path, shapes)
            if owner is None:
                continue
            if before is not None and (
                np.shape(leaf) == before.parameters.small_shapes[owner] != shapes[owner]
            ):
                leaf = before.put({path: leaf})[path]
            if np.shape(leaf) == shapes[owner]:
                taken[path] = self.cut.take({path: leaf})[path]
        return taken

    def export(self, folder: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
        """Writes the small network as a folder that runs without this package.

        Args:
          folder: Where to.
          **options: As `export_model` takes them, such as `overwrite`, `platforms`, and
            `format="onnx"`.
        Returns:
          The manifest.
        Raises:
          UserError: As `export_model`.
        """
        apply, params = self.apply, self.params
        if self.statistics is not None:
            params = {"params": self.params, "statistics": self.statistics}

            def apply(trees: PyTree, *inputs: PyTree) -> PyTree:
                return self.apply(trees["params"], trees["statistics"], *inputs)

        return export_model(
            folder,
            apply,
            params,
            self.full.inputs,
            certificate=self.certificate,
            cut=self.cut,
            **options,
        )


def _quotient(before: int, after: int) -> str:
    """How much is left."""
    return f"{after:,} of {before:,} ({after / max(before, 1):.3f})"
