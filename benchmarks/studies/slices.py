"""State and parameters in slices over 2 hosts: do interfaces count what traces say?

python -m benchmarks links --study=benchmarks/studies/slices.py --workdir=runs/slices
"""

from benchmarks.study import LinkStudy, variant_row, variant_rows

_METHODS = ("dense", "dense-int8", "hsadmm", "diloco", "topk", "powersgd", "pactrain")


def get_study() -> LinkStudy:
    return LinkStudy(
        name="slices",
        config="../../configs/digits_resnet20_dense.py",
        rows=(
            *variant_rows("dense"),
            *(
                variant_row(name, f"{name}-state", **{"topology.shard": "state"})
                for name in _METHODS
            ),
            variant_row("hsadmm", "hsadmm-params", **{"topology.shard": "params"}),
        ),
        settings={"data.batch_size": 8},
        num_hosts=(2,),
        devices_per_host=2,
        links=("unlimited",),
        rounds=2,
    )
