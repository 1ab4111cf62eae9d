"""Methods of all kinds with a tiny language model over 2 hosts, as a study."""

from benchmarks.study import LinkStudy, variant_row, variant_rows


def get_study() -> LinkStudy:
    return LinkStudy(
        name="language",
        config="../../configs/stdlib_gpt_dense.py",
        rows=(
            *variant_rows("dense", "hsadmm-4-top64", "pactrain", "topk", "powersgd"),
            variant_row("hsadmm-8-int8-small", **{"sparsity.scope": "inner"}),
            variant_row("dense", "dense-slices", **{"topology.shard": "state"}),
            variant_row("diloco", "diloco-slices", **{"topology.shard": "params"}),
            variant_row("topk", "topk-slices", **{"topology.shard": "state"}),
            variant_row("powersgd", "powersgd-slices", **{"topology.shard": "state"}),
            variant_row("pactrain", "pactrain-slices", **{"topology.shard": "state"}),
        ),
        settings={
            **{"data.batch_size": 8, "data.sequence_length": 16},
            **{"model.gpt.layers": 1, "model.gpt.width": 16, "model.gpt.heads": 2},
            **{"model.gpt.key_heads": 1, "model.gpt.head_width": 8},
            "model.gpt.hidden": 24,
        },
        num_hosts=(2,),
        devices_per_host=2,
        links=("unlimited",),
        rounds=2,
    )
