"""What methods must send that send the largest entries, from sizes alone."""

from collections.abc import Mapping

from prunex_jax.comm import Collective, dense_size
from prunex_jax.comm.formulas import device_sum, entry_gather, host_sum
from prunex_jax.methods.positions import is_named
from prunex_jax.methods.recipe import Recipe
from prunex_jax.sparsity import entry_count


class EntryTraffic:
    """Sizes of what competes and of what is sent whole.

    Args:
      recipe: What the trainer has built.
    """

    def __init__(self, recipe: Recipe) -> None:
        named = is_named(recipe.shapes, recipe.config.send_whole)
        pairs = zip(recipe.shapes.items(), named, strict=True)
        whole = {path: shape for (path, shape), is_whole in pairs if is_whole}
        self.wire = recipe.wire
        self.num_elements = dense_size(recipe.shapes)
        self.num_whole = dense_size(whole)
        self.num_open = self.num_elements - self.num_whole

    def count(self, density: float) -> int:
        """Entries that a host sends with their positions."""
        return entry_count(density, self.num_open) if self.num_open else 0

    def step(self, mesh_shape: Mapping[str, int], density: float) -> list[Collective]:
        """What one step sends."""
        sent = device_sum(self.num_elements, mesh_shape)
        if self.num_open:
            sent += entry_gather(self.count(density), mesh_shape, self.wire)
        if self.num_whole:
            sent += host_sum(self.num_whole, mesh_shape)
        return sent
