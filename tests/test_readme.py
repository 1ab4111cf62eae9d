"""What the README shows works: its Python runs, its targets and files exist."""

import re
from pathlib import Path

from tests.helpers.common import ROOT, run_script

README = (ROOT / "README.md").read_text()


def test_python_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
    script = tmp_path / "readme.py"
    checks = (
        "assert int((abs(network['hidden']).sum(0) > 0).sum()) == 8\n"
        "assert logits(jnp.zeros((1, 8, 8, 1))).shape == (1, 10)\n"
        "assert kept\n"
    )
    script.write_text("\n\n".join([*blocks, checks]))
    output = run_script(script, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
    assert "group hidden" in output


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^    make ([\w-]+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_named_files_exist() -> None:
    for name in set(re.findall(r"(?:configs|notebooks|prunex_jax)/[\w./]+\w", README)):
        assert (ROOT / name).exists(), name
