"""Traces, halves and compares networks of torchvision and timm, beside Torch-Pruning.

    make test-torchvision                      all of them; hours on two cores
    make test-torchvision NETWORKS=resnet18    some

Weights are random. Half of every channel group goes; the masked and the small network
are compared on random images. Rows are kept in build/coverage_pytorch.jsonl as they
come, so that a run that was stopped goes on where it was; without that file, all are
made anew. docs/coverage_pytorch.md is made of them. Exits with 1 if one is not exact.
"""

import importlib
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.coverage_table import what_stays
from prunex_jax.base.errors import one_line

ROWS = Path("build/coverage_pytorch.jsonl")
PAGE = Path("docs/coverage_pytorch.md")
# Of each family of torchvision the forms that differ in more than width and depth.
TORCHVISION = """
    alexnet squeezenet1_0 squeezenet1_1 vgg11 vgg11_bn resnet18 resnet50
    resnext50_32x4d wide_resnet50_2 densenet121 googlenet inception_v3 mobilenet_v2
    mobilenet_v3_small mobilenet_v3_large mnasnet0_5 mnasnet1_0 shufflenet_v2_x0_5
    shufflenet_v2_x1_0 regnet_x_400mf regnet_y_400mf efficientnet_b0 efficientnet_b1
    efficientnet_v2_s convnext_tiny vit_b_16 vit_b_32 swin_t swin_v2_t maxvit_t
    fcn_resnet50 deeplabv3_resnet50 deeplabv3_mobilenet_v3_large
    lraspp_mobilenet_v3_large r3d_18 mc3_18 r2plus1d_18 s3d mvit_v1_b mvit_v2_s
    swin3d_t raft_small raft_large
""".split()
# Whole, and then what of them comes before boxes are chosen, which depends on values.
DETECTION = """
    fcos_resnet50_fpn retinanet_resnet50_fpn retinanet_resnet50_fpn_v2 ssd300_vgg16
    ssdlite320_mobilenet_v3_large fasterrcnn_resnet50_fpn
    fasterrcnn_mobilenet_v3_large_320_fpn maskrcnn_resnet50_fpn
    keypointrcnn_resnet50_fpn
""".split()
BEFORE_BOXES = " (before boxes)"
# What timm is used for most.
TIMM = """
    resnet18d resnet26t resnetv2_50 seresnet18 skresnet18 ecaresnet26t
    res2net50_26w_4s resnest14d cspresnet50 darknet53 dla34 hrnet_w18 repvgg_a0
    rexnet_100 efficientnet_lite0 tf_efficientnetv2_b0 mobilenetv4_conv_small
    mobileone_s0 ghostnet_100 fbnetc_100 convnextv2_atto convmixer_768_32
    vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224
    beit_base_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 pit_ti_224 levit_128s
    mixer_s32_224 resmlp_12_224 gmlp_ti16_224 poolformer_s12 twins_svt_small pvt_v2_b0
    coat_lite_tiny crossvit_tiny_240 efficientformer_l1 edgenext_xx_small
    mobilevit_xxs mobilevitv2_050 fastvit_t8 inception_next_tiny focalnet_tiny_srf
    davit_tiny nest_tiny visformer_tiny swinv2_tiny_window8_256
    eva02_tiny_patch14_224
""".split()
NETWORKS = (
    *TORCHVISION,
    *DETECTION,
    *(name + BEFORE_BOXES for name in DETECTION),
    *TIMM,
)
EXACT = 1e-5
ALMOST_ALL = 0.99
# Of CPU time, as others may use the CPUs: for a network, and for Torch-Pruning.
LIMIT_SECONDS = 480
PEER_SECONDS = 30
# Programs run once, so that most of the time would go into making them fast.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
INTRODUCTION = """\
# Networks of PyTorch

Through torchax, with nothing written for any of them. *Prunable* is the share of the
parameters that can go; a matrix counts half where one of its axes can be cut and the
other one stays for no reason that every network has, as inputs, outputs and windows
are. *Differs by* is how far the masked and the small network are apart, relative to the
largest answer, when half of every group goes. *Torch-Pruning* is how many groups it
lists of the same network, or the error that it raises.

Weights are random. Parameters that evaluation does not use, such as the auxiliary
classifiers of googlenet and inception, count as staying. Which boxes a detector returns
depends on values, which no traced program can; what comes before that is traced.
Seconds are those of a CPU that may have had other work. Made by
`make test-torchvision`.
"""


def main() -> None:
    names = sys.argv[1:]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}"
    for package in ("jax", "timm", "torch_pruning", "torchax", "torchvision"):
        importlib.import_module(package)  # Once, for all processes that are forked.
    ROWS.parent.mkdir(exist_ok=True)
    known = read_rows()
    for name in names or NETWORKS:
        if name not in known or names:
            known[name] = in_a_process(name)
            with ROWS.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
            sys.stderr.write(f"{known[name]}\n")
            PAGE.write_text(page(known))
    PAGE.write_text(page(known))
    sys.exit(any(not row.get("error", 0) <= EXACT for row in known.values()))


def read_rows() -> dict[str, dict[str, Any]]:
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    return {row["network"]: row for row in map(json.loads, lines)}


def in_a_process(name: str) -> dict[str, Any]:
    """Measures in a process of its own, so that none inherits memory or crashes."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=send_row, args=(name, sends))
    process.start()
    sends.close()
    try:
        return receives.recv()
    except EOFError:  # It died.
        pass
    finally:
        process.join()
    why = f"exit code {process.exitcode}"
    if process.exitcode == -signal.SIGXCPU:
        why = f"longer than {LIMIT_SECONDS // 60} minutes of a CPU"
    return {"network": name, "failed": why}


def send_row(name: str, sends: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS + 9))
    try:
        sends.send(measure(name))
    except Exception as error:
        sends.send({"network": name, "failed": one_line(error, 300)})


def make_module(name: str) -> Any:
    """The network with random weights, also where its authors begin with zeros."""
    import torch

    torch.manual_seed(0)
    if name in TIMM:
        import timm

        module = timm.create_model(name, num_classes=10)
    else:
        module = make_torchvision(name.removesuffix(BEFORE_BOXES))
    with torch.no_grad():
        for tensor in module.parameters():
            if not tensor.any():
                tensor.normal_(std=0.02)
    return before_boxes(module.eval()) if name.endswith(BEFORE_BOXES) else module.eval()


def make_torchvision(name: str) -> Any:
    import torchvision

    options: dict[str, Any] = {"weights": None, "num_classes": 10}
    if name in DETECTION or name.startswith(("fcn", "deeplab", "lraspp")):
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if name.startswith("raft"):
        del options["num_classes"]
    return torchvision.models.get_model(name, **options)


def before_boxes(detector: Any) -> Any:
    """The network of a detector: features, and what its head says at every place."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = detector.backbone
            self.head = detector.rpn.head if hasattr(detector, "rpn") else detector.head

        def forward(self, images: Any) -> Any:
            return self.head(list(self.backbone(images).values()))

    return Network().eval()


def example_of(name: str, module: Any) -> tuple[Any, ...]:
    """Images of the size that a network needs, small where it takes any."""
    import torch

    size = 64
    if name in DETECTION:
        return ([torch.rand(3, 64, 64)],)
    if name in TIMM:
        size = module.default_cfg["input_size"][-1]
        is_fixed = module.default_cfg.get("fixed_input_size", False)
        size = size if is_fixed else min(size, 128)
    elif name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        return (torch.randn(2, 3, 4, 64, 64),)
    elif name in ("s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_t"):
        return (torch.randn(1, 3, 16, 224, 224),)
    elif name.startswith("raft"):
        return torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    elif name.startswith("ssd300"):
        size = 300
    elif name.startswith(("vit", "swin", "maxvit", "inception", "vgg", "alexnet")):
        size = 224
    return (torch.randn(2, 3, size, size),)


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    import jax
    import numpy as np

    from prunex_jax.channels import trace_channels
    from prunex_jax.pruner.networks import full_network
    from prunex_jax.shrink import make_cut, relative_error

    module = make_module(name)
    example = example_of(name, module)
    began = time.perf_counter()
    full = full_network(module, example, None)
    params, running, inputs = full.params, full.statistics, full.inputs
    apply = jax.jit(full.apply)  # Keeps the program, which is asked for three times.
    trace = trace_channels(apply, params, *inputs, statistics=running)
    seconds = time.perf_counter() - began
    masks = {
        group.name: np.arange(group.size) < max(1, group.size // 2)
        for group in trace.groups
    }
    cut = make_cut(trace, masks, params, running)
    # By numpy, which need not compile a program for every shape.
    masked = {path: np.zeros_like(x) for path, x in params.items()}
    less = {}
    for path, x in params.items():
        stays = np.ix_(*(cut.parameters.stays(path, axis) for axis in range(x.ndim)))
        less[path] = masked[path][stays] = np.asarray(x)[stays]
    rest = () if running is None else (running,)
    kept = () if running is None else (jax.jit(cut.take_statistics)(running),)
    with jax.default_matmul_precision("highest"):
        one = apply(masked, *rest, *inputs)
        two = jax.jit(cut.function(apply))(less, *kept, *inputs)
    if not any(map(np.any, jax.tree.leaves(one))):
        raise ValueError("every answer is zero, which proves nothing")
    error = relative_error(jax.tree.leaves(two), jax.tree.leaves(one))
    return {
        "network": name,
        "package": "timm" if name in TIMM else "torchvision",
        "params": sum(math.prod(x.shape) for x in params.values()),
        "share": trace.prunable_share(),
        "groups": len(trace.groups),
        "error": error,
        "seconds": seconds,
        "torch_pruning": named_by_torch_pruning(module, example),
        "stays": without_folders(what_stays(trace)),
    }


def without_folders(text: str) -> str:
    """Names source files by their packages, as on every machine."""
    return re.sub(r"/\S*/site-packages/", "", text.replace(f"{Path.cwd()}/", ""))


def named_by_torch_pruning(module: Any, example: tuple[Any, ...]) -> str:
    """How many groups Torch-Pruning lists; otherwise what it says."""
    import torch_pruning

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, PEER_SECONDS)
    try:
        graph = torch_pruning.DependencyGraph().build_dependency(module, example)
        return f"{len(list(graph.get_all_groups()))} groups"
    except TimeoutError:
        return f"longer than {PEER_SECONDS} s"
    except Exception as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def page(rows: dict[str, dict[str, Any]]) -> str:
    rows = {name: rows[name] for name in NETWORKS if name in rows}
    done = [row for row in rows.values() if "error" in row]
    exact = sum(row["error"] <= EXACT for row in done)
    packages = ("torch", "torchvision", "timm", "torchax", "torch-pruning", "jax")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    named = [row for row in done if row["torch_pruning"].endswith("groups")]
    wide = sum(row["share"] > ALMOST_ALL for row in named)
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        f"Versions: {versions}.",
        "",
        f"**{exact} of {len(done)} networks that were traced are exact to {EXACT:g}**; "
        f"more than {ALMOST_ALL:.0%} can go of {wide} of the {len(named)} that "
        f"Torch-Pruning names. {len(rows) - len(done)} were not traced, and "
        f"{len(NETWORKS) - len(rows)} of the list were not run yet.",
        "",
        "| network | package | parameters | prunable | groups | differs by "
        "| seconds to trace | Torch-Pruning |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in done:
        lines.append(
            f"| {row['network']} | {row['package']} | {row['params']:,} "
            f"| {_percent(row['share'])} | {row['groups']} | {row['error']:.1e} "
            f"| {row['seconds']:.1f} | {row['torch_pruning']} |"
        )
    less = [row for row in done if row["share"] <= ALMOST_ALL]
    if less:
        lines += ["", f"What stays where that is more than {1 - ALMOST_ALL:.0%}:", ""]
        lines += [f"- {row['network']}: {row['stays']}" for row in less]
    failed = [row for row in rows.values() if "failed" in row]
    if failed:
        lines += ["", "Not traced:", ""]
        lines += [f"- {row['network']}: {row['failed']}" for row in failed]
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{math.floor(1000 * share) / 10:.1f} %"


if __name__ == "__main__":
    main()
