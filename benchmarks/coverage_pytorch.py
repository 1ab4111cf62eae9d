"""Traces, halves and compares networks of torchvision and timm, beside Torch-Pruning.

    make test-torchvision                      all of them; hours on two cores
    make test-torchvision NETWORKS=resnet18    some

Weights are random. Half of every channel group goes; the masked and the small network
are compared on random images. Rows are kept in build/coverage_pytorch.jsonl as they
come, and docs/coverage_pytorch.md is made of them. Exits with 1 if one is not exact.
"""

import json
import math
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROWS = Path("build/coverage_pytorch.jsonl")
PAGE = Path("docs/coverage_pytorch.md")
# Of each family of torchvision one or two; then what timm is used for most.
TORCHVISION = (
    *("alexnet", "squeezenet1_1", "vgg11", "vgg11_bn", "resnet18", "resnet50"),
    *("resnext50_32x4d", "wide_resnet50_2", "densenet121", "googlenet", "inception_v3"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5"),
    *("shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "regnet_y_400mf", "regnet_x_400mf"),
    *("efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "vit_b_16", "swin_t"),
    *("swin_v2_t", "maxvit_t", "fcn_resnet50", "deeplabv3_mobilenet_v3_large"),
    *("lraspp_mobilenet_v3_large", "r3d_18", "mc3_18", "r2plus1d_18", "s3d"),
    *("mvit_v1_b", "swin3d_t"),
)
TIMM = (
    *(
        "resnet18d",
        "resnet26t",
        "resnetv2_50",
        "seresnet18",
        "skresnet18",
        "ecaresnet26t",
    ),
    *(
        "res2net50_26w_4s",
        "resnest14d",
        "cspresnet50",
        "darknet53",
        "dla34",
        "hrnet_w18",
    ),
    *("repvgg_a0", "rexnet_100", "efficientnet_lite0", "tf_efficientnetv2_b0"),
    *("mobilenetv4_conv_small", "mobileone_s0", "ghostnet_100", "fbnetc_100"),
    *("convnextv2_atto", "convmixer_768_32", "vit_tiny_patch16_224"),
    *("deit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224"),
    *("cait_xxs24_224", "xcit_nano_12_p16_224", "pit_ti_224", "levit_128s"),
    *("mixer_s32_224", "resmlp_12_224", "gmlp_ti16_224", "poolformer_s12"),
    *("twins_svt_small", "pvt_v2_b0", "coat_lite_tiny", "crossvit_tiny_240"),
    *("efficientformer_l1", "edgenext_xx_small", "mobilevit_xxs", "mobilevitv2_050"),
    *("fastvit_t8", "inception_next_tiny", "focalnet_tiny_srf", "davit_tiny"),
    *(
        "nest_tiny",
        "visformer_tiny",
        "swinv2_tiny_window8_256",
        "eva02_tiny_patch14_224",
    ),
)
SMALL_IMAGES = 64
EXACT = 1e-5


def main() -> None:
    names = sys.argv[1:]
    if names[:1] == ["--one"]:
        sys.stdout.write(json.dumps(measure(names[1])) + "\n")
        return
    ROWS.parent.mkdir(exist_ok=True)
    known = read_rows()
    for name in names or [*TORCHVISION, *TIMM]:
        if name not in known or names:
            known[name] = in_a_process(name)
            with ROWS.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
            sys.stderr.write(f"{known[name]}\n")
    PAGE.write_text(page(known))
    sys.exit(any(row.get("error", 0) > EXACT for row in known.values()))


def read_rows() -> dict[str, dict[str, Any]]:
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    return {row["network"]: row for row in map(json.loads, lines)}


def in_a_process(name: str) -> dict[str, Any]:
    """Measures in a process of its own, so that none inherits memory or crashes."""
    command = [sys.executable, "-m", "benchmarks", "coverage_pytorch", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"network": name, "failed": why[:300]}


def make_module(name: str) -> Any:
    """The network with random weights, also where its authors begin with zeros."""
    import torch

    torch.manual_seed(0)
    if name in TIMM:
        import timm

        module = timm.create_model(name, num_classes=10)
    else:
        import torchvision

        weights = {"weights": None}
        if name.startswith(("fcn", "deeplab", "lraspp")):
            weights["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            weights["init_weights"] = False
        module = torchvision.models.get_model(name, num_classes=10, **weights)
    with torch.no_grad():
        for tensor in module.parameters():
            if not tensor.any():
                tensor.normal_(std=0.02)
    return module.eval()


def example_of(name: str, module: Any) -> Any:
    """Images of the size that a network needs, small where it takes any."""
    import torch

    if name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        return torch.randn(2, 3, 4, 64, 64)
    if name in ("s3d", "mvit_v1_b", "swin3d_t"):
        return torch.randn(1, 3, 16, 224, 224)
    size = SMALL_IMAGES
    if name in TIMM:
        size = module.default_cfg["input_size"][-1]
        is_fixed = module.default_cfg.get("fixed_input_size", False)
        size = size if is_fixed else min(size, 128)
    elif name.startswith(("vit", "swin", "maxvit", "inception", "vgg", "alexnet")):
        size = 224
    return torch.randn(2, 3, size, size)


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    import jax
    import numpy as np

    from prunex_jax.channels import trace_channels
    from prunex_jax.pruner.networks import full_network
    from prunex_jax.shrink import make_cut, relative_error

    module = make_module(name)
    x = example_of(name, module)
    began = time.perf_counter()
    full = full_network(module, [x], None)
    apply, params, running = full.apply, full.params, full.statistics
    trace = trace_channels(apply, params, *full.inputs, statistics=running)
    seconds = time.perf_counter() - began
    masks = {
        group.name: np.arange(group.size) < max(1, group.size // 2)
        for group in trace.groups
    }
    cut = make_cut(trace, masks, params, running)
    rest = () if running is None else (running,)
    less = () if running is None else (cut.take_statistics(running),)
    with jax.default_matmul_precision("highest"):
        one = jax.jit(apply)(cut.mask(params), *rest, *full.inputs)
        two = jax.jit(cut.function(apply))(cut.take(params), *less, *full.inputs)
    error = relative_error(jax.tree.leaves(two), jax.tree.leaves(one))
    return {
        "network": name,
        "package": "timm" if name in TIMM else "torchvision",
        "params": sum(math.prod(x.shape) for x in params.values()),
        "share": trace.prunable_share(),
        "groups": len(trace.groups),
        "error": error,
        "seconds": seconds,
        "torch_pruning": named_by_torch_pruning(module, x),
    }


def named_by_torch_pruning(module: Any, x: Any) -> str:
    """Whether Torch-Pruning lists its groups; otherwise what it says."""
    import torch_pruning

    try:
        graph = torch_pruning.DependencyGraph().build_dependency(module, x)
        return f"{len(list(graph.get_all_groups()))} groups"
    except Exception as error:
        return type(error).__name__


def page(rows: dict[str, dict[str, Any]]) -> str:
    done = [row for row in rows.values() if "error" in row]
    exact = sum(row["error"] <= EXACT for row in done)
    packages = ("torch", "torchvision", "timm", "torchax", "torch-pruning", "jax")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines = [
        "# Networks of PyTorch",
        "",
        "Through torchax, with nothing written for any of them: the share of the",
        "parameters that lie in some channel group, and by how much the masked and",
        "the small network differ, relative to the largest answer, when half of every",
        "group goes. Weights are random. *Torch-Pruning* is how many groups it lists",
        "of the same network, or the error that it raises. Auxiliary classifiers, as",
        "in googlenet and inception, which evaluation does not use, count as staying.",
        "Seconds are those of a CPU that may have had other work. Made by",
        "`make test-torchvision`;",
        f"{versions}.",
        "",
        f"**{exact} of {len(done)} networks that were traced are exact to {EXACT:g}**; "
        f"{len(rows) - len(done)} did not get so far, and "
        f"{len({*TORCHVISION, *TIMM} - set(rows))} of the list were not run yet.",
        "",
        "| network | package | parameters | prunable | groups | differs by | seconds "
        "to trace | Torch-Pruning |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in done:
        share = math.floor(1000 * row["share"]) / 10
        lines.append(
            f"| {row['network']} | {row['package']} | {row['params']:,} "
            f"| {share:.1f} % | {row['groups']} | {row['error']:.1e} "
            f"| {row['seconds']:.1f} | {row['torch_pruning']} |"
        )
    failed = [row for row in rows.values() if "failed" in row]
    if failed:
        lines += ["", "Not traced:", ""]
        lines += [f"- {row['network']}: {row['failed']}" for row in failed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
