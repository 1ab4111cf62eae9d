"""Makes `configs/` a part of the wheel, as `prunex_jax/configs`; see pyproject.toml."""

from setuptools import find_packages, setup

CONFIGS = ["configs", "configs.sweeps"]

setup(
    packages=[
        *find_packages(include=["prunex_jax", "prunex_jax.*"]),
        *(f"prunex_jax.{name}" for name in CONFIGS),
    ],
    package_dir={"prunex_jax.configs": "configs"},
)
