"""A trained network whose answers are learned beside the labels: distillation.

Any export serves as a teacher: that of a dense run, of an earlier checkpoint, or of a
network of another package, as long as it reads the same images. Its logits are computed
for every training batch on the device that has the images, and nothing is sent for it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prunex_jax.data import Dataset
from prunex_jax.errors import UserError
from prunex_jax.export import ExportedModel, read_model
from prunex_jax.objective import TEACHER
from prunex_jax.program import Ledger, Program
from prunex_jax.settings import DistillConfig
from prunex_jax.topology import DEVICE_AXIS, HOST_AXIS, AnyMesh, sharding_on

_BATCH = jax.P((HOST_AXIS, DEVICE_AXIS))


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A network that answers training batches.

    Attributes:
      arrays: Its parameters, on every device.
      program: (arrays, image float32[batch, h, w, c]) -> logits, float32[batch,
        classes]; both split over the mesh along the batch.
    """

    arrays: Mapping[str, jax.Array]
    program: Program

    def taught(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch with what the teacher says of its images."""
        return {**batch, TEACHER: self.program(self.arrays, batch["image"])}


def read_teacher(
    config: DistillConfig, dataset: Dataset, mesh: AnyMesh, ledger: Ledger
) -> Teacher | None:
    """Reads the teacher that settings name.

    Args:
      config: Where it lies; empty for none.
      dataset: What is trained on: the teacher has to read its images.
      mesh: Where batches are.
      ledger: Counts the calls of its program.
    Returns:
      The teacher, or None.
    Raises:
      UserError: The folder is no export or was damaged, or its network was made for
        other images or classes.
    """
    if not config.teacher:
        return None
    model = read_model(config.teacher)
    _check_reads(model, dataset, config.teacher)
    program = Program(
        "teacher", lambda: _on_mesh(model.program, mesh), dict(mesh.shape), ledger
    )
    arrays = {
        path: _on_all_devices(array, mesh) for path, array in model.arrays.items()
    }
    return Teacher(arrays, program)


def _on_mesh(program: Callable[..., Any], mesh: AnyMesh) -> Callable[..., jax.Array]:
    """Every device answers its images; a folded mesh has them all on one."""

    def answer(arrays: Mapping[str, jax.Array], images: jax.Array) -> jax.Array:
        logits: jax.Array = program(dict(arrays), images)
        return logits.astype(jnp.float32)

    if not isinstance(mesh, Mesh):
        return answer
    return jax.shard_map(
        answer, mesh=mesh, in_specs=(jax.P(), _BATCH), out_specs=_BATCH, check_vma=False
    )


def _on_all_devices(array: np.ndarray, mesh: AnyMesh) -> jax.Array:
    sharding = sharding_on(mesh, jax.P())
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def _check_reads(model: ExportedModel, dataset: Dataset, folder: str) -> None:
    """Refuses a teacher of other images, or of other classes."""
    said = model.manifest.get("dataset")
    if said is not None:
        for key in ("mean", "std"):
            theirs = said["preprocessing"][key]
            ours = list(getattr(dataset.normalization, key))
            if not np.array_equal(theirs, ours):
                raise UserError(
                    f"the teacher in {folder} was trained on {said['name']} with a "
                    f"{key} of pixels of {theirs}, and {dataset.name} has {ours} here; "
                    "train one on this data set, with the same data.validation_share"
                )
    images = jax.ShapeDtypeStruct((8, *dataset.image_shape), np.float32)
    wanted = (8, dataset.num_classes)
    try:
        shape = jax.eval_shape(model.program, dict(model.arrays), images).shape
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the teacher in {folder} does not take {dataset.name}'s images of shape "
            f"{dataset.image_shape}: {str(error).splitlines()[0]}"
        ) from error
    if shape != wanted:
        raise UserError(
            f"the teacher in {folder} answers {list(wanted[:1])} images with "
            f"{list(shape)}, and {dataset.name} has {dataset.num_classes} classes; use "
            "one for these classes"
        )
