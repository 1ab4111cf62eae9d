"""Networks that other people write, as test cases: the acceptance list and more.

`table` lists them; modules named after a framework hold them: `*_packaged` takes the
models that packages bring, `*_own` and `plain_*` are written here where none do.
Nothing is imported or built until a `Network` is asked to.
"""

from .case import PUBLISHED, TINY, Case, Network
from .table import NETWORKS

__all__ = ["NETWORKS", "PUBLISHED", "TINY", "Case", "Network"]
