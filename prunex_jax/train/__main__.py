"""python -m prunex_jax.train: see `prunex_jax.train.commands.command`."""

import sys

from prunex_jax.train.commands.command import main

if __name__ == "__main__":
    sys.exit(main())
