"""ResNet-20 on handwritten digits with PacTrain, half of the channels pruned at birth.

Channels are chosen by gradient flow on the first batches; from then on the gradients of
the others are packed and averaged, without positions, and the network is small at the
end.

    python -m prunex_jax.train --workdir=runs/demo_pactrain \\
        --config=configs/digits_resnet20_pactrain.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "pactrain"
    return config
