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

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import ExperimentConfig
from prunex_jax.data import Dataset
from prunex_jax.export import ExportedModel, read_model
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, AnyMesh, sharding_on
from prunex_jax.train.objective import TEACHER
from prunex_jax.train.program import Ledger, Program

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
    config: ExperimentConfig, dataset: Dataset, mesh: AnyMesh, ledger: Ledger
) -> Teacher | None:
    """Reads the teacher that settings name.

    Args:
      config: Says where it lies, if there is one, and how large batches are.
      dataset: What is trained on: the teacher has to read its images.
      mesh: Where batches are.
      ledger: Counts the calls of its program.
    Returns:
      The teacher, or None.
    Raises:
      UserError: The folder is no export or was damaged, or its network was made for
        other images or classes.
    """
    folder = config.distill.teacher
    if not folder:
        return None
    model = read_model(folder)
    _check_normalization(model, dataset, folder)
    images_per_device = config.data.batch_size // mesh.devices.size
    _check_answers(model, dataset, images_per_device, folder)
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
    # What is inside an exported program is not checked for how it varies over a mesh.
    return jax.shard_map(
        answer, mesh=mesh, in_specs=(jax.P(), _BATCH), out_specs=_BATCH, check_vma=False
    )


def _on_all_devices(array: np.ndarray, mesh: AnyMesh) -> jax.Array:
    sharding = sharding_on(mesh, jax.P())
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def _check_normalization(model: ExportedModel, dataset: Dataset, folder: str) -> None:
    """Refuses a teacher that knows other images; exports of functions do not say."""
    said = model.manifest.get("dataset")
    if said is None:
        return
    for key in ("mean", "std"):
        theirs = said["preprocessing"][key]
        ours = list(getattr(dataset.normalization, key))
        if not np.array_equal(theirs, ours):
            raise UserError(
                f"the teacher in {folder} was trained on {said['name']} with pixels "
                f"of {key} {theirs}, and {dataset.name} has {ours} here; train one on "
                "this data set, with the same data.validation_share"
            )


def _check_answers(
    model: ExportedModel, dataset: Dataset, count: int, folder: str
) -> None:
    """Refuses a teacher that cannot take a device's images, or knows other classes."""
    images = jax.ShapeDtypeStruct((count, *dataset.image_shape), np.float32)
    wanted = (count, dataset.num_classes)
    try:
        shape = jax.eval_shape(model.program, dict(model.arrays), images).shape
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the teacher in {folder} takes no {count} images {dataset.image_shape}"
            f" of {dataset.name}: {str(error).splitlines()[0]}"
        ) from error
    if shape != wanted:
        raise UserError(
            f"the teacher in {folder} answers {count} images with {list(shape)} "
            f"numbers, and {dataset.name} has {dataset.num_classes} classes"
        )
