"""How fast devices can multiply matrices at best, by the names that jax gives them.

Only what their maker states is listed: dense products of bfloat16 numbers that are
added up in float32, or of float16 numbers where there is no bfloat16 (V100, T4).
"""

_TERA = 1e12
# Part of a device's kind -> teraFLOPs per second. Of several that fit, the longest
# counts. From the data sheets of NVIDIA, whose figures with sparsity are twice these.
_PEAKS = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "A100": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "V100-PCIE": 112.0,
    "T4": 65.0,
}


def peak_flops(kind: str) -> float | None:
    """Floating point operations per second that a device does at best.

    Args:
      kind: As `jax.Device.device_kind`.
    Returns:
      Those of its matrix products; None of devices that are not listed, such as CPUs.
    Example:
      >>> peak_flops('NVIDIA A100-SXM4-80GB') / 1e12, peak_flops('cpu')
      (312.0, None)
    """
    if "Laptop" in kind:  # slower ones by the same name
        return None
    words = f" {kind.replace('-', ' ')} "
    found = [name for name in _PEAKS if f" {name.replace('-', ' ')} " in words]
    return _PEAKS[max(found, key=len)] * _TERA if found else None
