"""What the three stages of a round are given beside values."""

import dataclasses
from collections.abc import Mapping

from prunex_jax.channels import Layouts
from prunex_jax.methods.hsadmm.copies import Copies
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.method import RoundKind


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """One round, of all parameters or of a fragment; static."""

    form: HsadmmParameters
    copies: Copies  # Where copies of the parameters live.
    layouts: Layouts  # Where channels are in them.
    keep_counts: Mapping[str, int]  # K_g per group.
    kind: RoundKind = "moving"
