"""Every method on digits over 2 network hosts: do interfaces count what traces say?

The short study that CI runs; it shows bytes, not speed.

    python -m prunex_jax.bench --study=configs/bench/digits.py --workdir=runs/bytes
"""

from methods import every_method

from prunex_jax.bench.studies import Study


def get_study() -> Study:
    return Study(
        name="digits",
        config="../digits_resnet20_dense.py",
        rows=every_method(),
        settings={"data.batch_size": 8, "model.width": 0.5},
        num_hosts=(2,),
        devices_per_host=2,
        links=("unlimited",),
        rounds=2,
    )
