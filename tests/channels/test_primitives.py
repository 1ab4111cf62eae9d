"""Every primitive of jax has a rule, or is refused on purpose."""

import importlib
import pkgutil
import sys
import warnings

import jax
import jax.numpy as jnp
from jax.extend import core

from prunex_jax.base.jaxprs import CALLS, MESH_CASTS
from prunex_jax.channels import RULES, trace_channels
from prunex_jax.channels.rules.refused import REFUSED

# Languages of kernels: their primitives are met inside of kernels alone, which are
# refused as wholes.
KERNELS = ("jax._src.pallas", "jax.experimental.mosaic", "jax.experimental.pallas")
KERNELS += ("jax._src.thunky", "jax.experimental.thunky")


def import_all(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        try:
            found = importlib.import_module(module.name)
        except Exception:  # needs what is not installed
            continue
        if module.ispkg:
            import_all(found)


def primitives_of_jax():
    """name -> modules of jax that hold a primitive of this name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_all(jax)
    found = {}
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("jax.") else ():
            if isinstance(value, core.Primitive):
                found.setdefault(value.name, set()).add(name)
    return found


def test_every_primitive_has_a_rule_or_is_refused_on_purpose():
    found = primitives_of_jax()
    assert len(found) > 300
    known = {*RULES, *CALLS, *MESH_CASTS, *REFUSED}
    unknown = {
        name: sorted(modules)[0]
        for name, modules in found.items()
        if name not in known and not all(m.startswith(KERNELS) for m in modules)
    }
    assert not unknown, "give a rule, or a reason in channels/rules/refused.py"


def test_nothing_has_a_rule_and_is_refused():
    assert not set(REFUSED) & {*RULES, *CALLS}


def test_what_is_refused_says_why():
    def apply(p, x):
        return jnp.linalg.qr(x @ p["a"])[0] @ p["b"]

    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
    trace = trace_channels(apply, params, jnp.ones((5, 3)))
    assert not trace.groups
    assert "qr: may not be finite, or not have a derivative" in trace.explain("a")
