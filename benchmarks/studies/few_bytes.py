"""Few bits and few numbers on digits: do interfaces count what traces say?

Beside `digits.py`, which has the methods: formats with error feedback, the largest of
every chunk on both routes, and short entries, on 2 and 4 hosts.

    python -m benchmarks links --study=benchmarks/studies/few_bytes.py \\
        --workdir=runs/bytes
"""

from benchmarks.study import LinkStudy, variant_rows


def get_study() -> LinkStudy:
    return LinkStudy(
        name="few-bytes",
        config="../../configs/digits_resnet20_dense.py",
        rows=variant_rows(
            *("dense", "dense-int2", "local-sgd-8-int2", "local-sgd-4-top64"),
            *("local-sgd-8-top64-owners", "hsadmm-4-top64"),
            *("topk-chunks", "dgc-chunks"),
        ),
        settings={"data.batch_size": 8, "model.width": 0.5},
        num_hosts=(2, 4),
        devices_per_host=2,
        links=("unlimited",),
        rounds=2,
    )
