"""Methods of all kinds on digits over 2 hosts: do interfaces count what traces say?

The short study, of which every run of CI draws a row; it shows bytes, not speed.
`steps` has every row.

    python -m benchmarks links --study=benchmarks/studies/digits.py --workdir=runs/bytes
"""

from benchmarks.study import LinkStudy, variant_rows


def get_study() -> LinkStudy:
    return LinkStudy(
        name="digits",
        config="../../configs/digits_resnet20_dense.py",
        rows=variant_rows(
            *("dense", "dense-int8", "hsadmm", "hsadmm-8-int8-small", "pactrain"),
            *("topk", "dgc", "powersgd", "importance", "diloco"),
        ),
        settings={"data.batch_size": 8, "model.width": 0.5},
        num_hosts=(2,),
        devices_per_host=2,
        links=("unlimited",),
        rounds=2,
    )
