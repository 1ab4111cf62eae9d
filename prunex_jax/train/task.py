"""What is learned: the examples, the network, and a teacher for distillation.

All that knows images and labels is here and in `objective`. Any export serves as a
teacher: that of a dense run, of an earlier checkpoint, or of a network of another
package, as long as it reads the same images. Its logits are computed for every training
batch on the device that has the images, and nothing is sent for it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prunex_jax.base.errors import UserError
from prunex_jax.data import Dataset
from prunex_jax.export import ExportedModel, read_model
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, AnyMesh, sharding_on
from prunex_jax.models import Model
from prunex_jax.train.config import ExperimentConfig
from prunex_jax.train.objective import TEACHER
from prunex_jax.train.program import Ledger, Program

_BATCH = jax.P((HOST_AXIS, DEVICE_AXIS))


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A trained network whose answers are learned beside the labels."""

    arrays: Mapping[str, jax.Array]  # Its parameters, on every device.
    # (arrays, image float32[batch, h, w, c]) -> logits, float32[batch, classes]; both
    # split over the mesh along the batch.
    program: Program


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is learned, and by which network."""

    dataset: Dataset  # The examples.
    model: Model  # The network at full width.
    teacher: Teacher | None  # What is learned from beside the labels.

    def taught(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """A training batch as the local step takes it: with a teacher's answers."""
        if self.teacher is None:
            return batch
        answers = self.teacher.program(self.teacher.arrays, batch["image"])
        return {**batch, TEACHER: answers}


def read_teacher(
    config: ExperimentConfig, dataset: Dataset, mesh: AnyMesh, ledger: Ledger
) -> Teacher | None:
    """Reads the teacher that settings name.

    Raises:
      UserError: The folder is no export or was damaged, or its network was made for
        other images or classes.
    """
    folder = config.distill.teacher
    if not folder:
        return None
    model = read_model(folder)
    _check_teacher(model, dataset, config.data.batch_size // mesh.devices.size, folder)
    program = Program(
        "teacher", lambda: _on_mesh(model.program, mesh), dict(mesh.shape), ledger
    )
    everywhere = sharding_on(mesh, jax.P())
    arrays = {
        path: jax.make_array_from_callback(array.shape, everywhere, array.__getitem__)
        for path, array in model.arrays.items()
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


def _check_teacher(
    model: ExportedModel, dataset: Dataset, count: int, folder: str
) -> None:
    """Refuses a teacher that cannot take a device's images, or knows other classes."""
    # Exports of functions do not say what they were trained on.
    said = model.manifest.get("dataset") or {}
    for key in ("mean", "std") if said else ():
        theirs = said["preprocessing"][key]
        ours = list(getattr(dataset.normalization, key))
        if not np.array_equal(theirs, ours):
            raise UserError(
                f"the teacher in {folder} was trained on {said['name']} with pixels "
                f"of {key} {theirs}, and {dataset.name} has {ours} here; train one on "
                "this data set, with the same data.validation_share"
            )
    images = jax.ShapeDtypeStruct((count, *dataset.image_shape), np.float32)
    try:
        shape = jax.eval_shape(model.program, dict(model.arrays), images).shape
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the teacher in {folder} takes no {count} images {dataset.image_shape}"
            f" of {dataset.name}: {str(error).splitlines()[0]}"
        ) from error
    if shape != (count, dataset.num_classes):
        raise UserError(
            f"the teacher in {folder} answers {count} images with {list(shape)} "
            f"numbers, and {dataset.name} has {dataset.num_classes} classes"
        )
