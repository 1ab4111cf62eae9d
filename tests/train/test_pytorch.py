"""Modules of PyTorch through whole runs, and back to PyTorch."""

import copy

import jax
import numpy as np
import pytest

from prunex_jax import prune
from prunex_jax.base.errors import UserError
from prunex_jax.export import read_model
from prunex_jax.train import open_run, train
from tests.helpers.tiny_runs import OVER_A_CUT, StopAtOnce, merged, rows_of, stop_after

torch = pytest.importorskip("torch", reason="needs the extra pytorch")
pytest.importorskip("torchax", reason="needs the extra pytorch")
pytestmark = pytest.mark.pytorch
NAMED = "tests.helpers.torch_networks:NETWORK"

SETTINGS = merged(
    OVER_A_CUT,
    {"data": {"name": "digits", "batch_size": 64}, "run": {"steps": 60}},
)
SHORT = {
    "topology": {"layout": "1"},
    "data": {"name": "digits", "batch_size": 64},
    "method": {"name": "dense"},
    "run": {"steps": 4, "log_every_steps": 1},
}


def network():
    from tests.helpers.torch_networks import NETWORK

    return copy.deepcopy(NETWORK)


def answers(module, x):
    with torch.no_grad():
        return module.eval()(torch.tensor(np.asarray(x))).numpy()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that was cut, its module, and the weights that it began with."""
    module, folder = network(), tmp_path_factory.mktemp("runs") / "run"
    before = copy.deepcopy(module.state_dict())
    return train(SETTINGS, folder, model=module), module, before, folder


def test_a_module_learns_is_cut_and_comes_back(ended):
    result, module, before, folder = ended
    summary = result.summary
    assert summary["test_accuracy"] > 0.6, "chance is 0.1"
    assert 0 < summary["shrink_step"] < summary["steps"]
    assert summary["params_kept"] < 0.6 * summary["params_dense"]
    assert summary["shrink_max_abs_error"] < 1e-5
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    small, x = result.module(), np.random.default_rng(0).random((9, 8, 8, 1), "f4")
    assert small.one.out_channels == small.norm.num_features == small.each.groups == 8
    wanted = result.network.logits(x)
    np.testing.assert_allclose(answers(small, x), wanted, atol=1e-4)
    opened = open_run(folder, model=module).trained.module().state_dict()
    for name, tensor in small.state_dict().items():
        # Statistics are means over devices, which one device stands for there.
        np.testing.assert_allclose(opened[name], tensor, atol=1e-6, err_msg=name)


def test_what_is_exported_answers_alike(ended, tmp_path):
    result = ended[0]
    result.export(tmp_path / "model")
    found = read_model(tmp_path / "model")
    assert found.manifest["certificate"]["forward_error"] < 1e-5
    x = np.random.default_rng(0).random((5, 8, 8, 1), "f4")
    np.testing.assert_allclose(found(x), answers(result.module(), x), atol=1e-4)


@pytest.mark.parametrize("stopped_at", [15, 45])
def test_a_resumed_run_draws_the_same(ended, stopped_at, tmp_path):
    """Dropout follows seed and step, and statistics go on: around the cut."""
    with pytest.raises(StopAtOnce):
        watch = stop_after(stopped_at)
        train(SETTINGS, tmp_path / "run", model=network(), after_step=[watch])
    resumed = train(SETTINGS, tmp_path / "run", model=network())
    for tree in ("params", "statistics"):
        found, wanted = (getattr(x.network, tree) for x in (resumed, ended[0]))
        assert found.keys() == wanted.keys() and found
        for name, leaf in wanted.items():
            np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_a_pruned_module_trains_on(tmp_path):
    module = network()
    small = prune(module, torch.rand(4, 8, 8, 1), sparsity=0.5)
    result = train(SHORT, tmp_path / "run", model=small.module())
    assert result.summary["params_dense"] == small.num_params[1]
    assert result.network.params["each.weight"].shape == (8, 1, 3, 3)
    moved = result.network.statistics["norm.running_mean"]
    assert np.abs(moved - small.statistics["norm.running_mean"]).max() > 1e-3
    # A network that kept its size: its state dict is all that there is to take.
    tuned = result.module().state_dict()
    np.testing.assert_array_equal(tuned["norm.running_mean"], moved)
    small.module().load_state_dict(tuned)


def test_a_module_is_named_in_settings(tmp_path):
    train({**SHORT, "model": {"name": NAMED}}, tmp_path / "named")
    train(SHORT, tmp_path / "given", model=network())
    losses = [
        [row["loss"] for row in rows_of(tmp_path / name)] for name in ("named", "given")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_settings_of_other_networks_are_refused(tmp_path):
    for name, value in (("compute_dtype", "bfloat16"), ("width", 0.5)):
        values = merged(SETTINGS, {"model": {name: value}})
        with pytest.raises(UserError, match=f"config.model.{name}.* has no effect on"):
            train(values, tmp_path / "run", model=network())
    with pytest.raises(UserError, match="no module of PyTorch"):
        init = lambda key: {"w": jax.random.normal(key, (64, 10))}  # noqa: E731
        apply = lambda w, x: x.reshape(len(x), -1) @ w["w"]  # noqa: E731
        train(SHORT, tmp_path / "pair", model=(init, apply)).module()


def test_parameters_may_be_narrow_and_norms_of_a_host(tmp_path):
    changes = {"model": {"norm_scope": "host", "param_dtype": "bfloat16"}}
    values = merged(SETTINGS, {**changes, "run": {"steps": 20}})
    values["topology"] = {"layout": "1", "cpu_devices": 0}
    result = train(values, tmp_path / "run", model=network())
    assert result.summary["shrink_max_abs_error"] < 1e-5
    assert np.isfinite(result.summary["test_loss"])
