import importlib.util
import os

import pytest

from mogrifier_jax import errors
from mogrifier_jax.preflight import chips, targets, topologies

INSTALLED = {
    "tpu": importlib.util.find_spec("libtpu") is not None,
    "gpu": any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
}


@pytest.mark.parametrize(
    ("name", "chips", "shape"),
    [
        ("v5e:1x1", 1, (1, 1)),
        ("v5e:4x4", 16, (4, 4)),
        ("v6e:16x16", 256, (16, 16)),
        ("v4:2x2x1", 4, (2, 2, 1)),
        ("v5p:2x2x4", 16, (2, 2, 4)),
        ("v5p:8x8x16", 1024, (8, 8, 16)),
        ("h100:8", 8, (1, 8)),
        ("a100:4", 4, (1, 4)),
        ("l4:1", 1, (1, 1)),
        ("a100-80g:32", 32, (4, 8)),
    ],
)
def test_names(name, chips, shape):
    target = targets.parse(name)
    assert (target.num_chips, target.shape, target.name) == (chips, shape, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v7:2x2", "names no known chip; use one of v4, v5e, v5p, v6e, a100, a100-80g, h100, l4"),
        ("v5e", "not a slice of v5e; use one of 1x1, 2x2"),
        ("v5e:3x4", "not a slice of v5e"),
        ("v5e:32x32", "not a slice of v5e"),
        ("v5e:axb", "not a slice of v5e"),
        ("v5p:4x4", "not a slice of v5p; use one of 1x1x1, 2x2x1"),
        ("v5p:4x4x6", "three multiples of 4 with at most 6144 chips"),
        ("v4:16x16x20", "at most 4096 chips"),
        ("v4:4x4x-4", "not a slice of v4"),
        ("h100:12", "from 1 to 8 or a multiple of 8, such as h100:8"),
        ("h100:0", "from 1 to 8"),
        ("h100:2x4", "from 1 to 8"),
    ],
)
def test_names_that_cannot_be(name, message):
    with pytest.raises(errors.UsageError, match=message):
        targets.parse(name)


def test_clocks_are_plausible():
    """Peak over operations a cycle gives a frequency that such chips run at."""
    for chip in chips.CHIPS.values():
        assert 0.9e9 < chip.clock < 2.1e9, chip.generation
        assert chip.kind == "gpu" or chip.memory > 15 * 2**30


def test_splits_cover_all_chips():
    target = targets.parse("v5e:2x4")
    assert targets.splits(target) == [(8, 1), (4, 2), (2, 4), (1, 8)]


def test_a_mesh_that_does_not_cover_is_refused():
    with pytest.raises(errors.UsageError, match=r"all 8 devices: .* 8 x 1, 4 x 2, 2 x 4, 1 x 8"):
        topologies.make_mesh(targets.parse("v5e:2x4"), 3, 2)


@pytest.mark.parametrize(
    ("name", "group", "bandwidth", "hops"),
    [
        ("v5e:16x16", 16, 90e9, 15),  # One closed axis.
        ("v5e:16x16", 256, 180e9, 30),  # Both axes.
        ("v5e:4x4", 4, 45e9, 3),  # Too short to close.
        ("v5p:4x4x4", 64, 540e9, 9),
        ("h100:8", 8, 450e9, 7),
        ("h100:16", 16, 50e9, 15),  # Over the network.
    ],
)
def test_rings(name, group, bandwidth, hops):
    assert targets.ring(targets.parse(name), group) == (bandwidth, hops)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("v5e:2x2", "libtpu", r"\.\[preflight\]"), ("h100:8", "jax_cuda", r"\.\[preflight\]")],
)
def test_missing_compilers_are_named(monkeypatch, name, module, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda m: None if m.startswith(module) else find(m)
    )
    with pytest.raises(errors.UsageError, match=f"needs the .* compiler.*pip install {extra}"):
        topologies.describe_topology(targets.parse(name))


@pytest.mark.parametrize(
    "name",
    ["v4:2x2x1", "v5e:1x1", "v5e:16x16", "v5p:2x2x2", "v6e:4x4", "a100:4", "h100:8", "l4:1"],
)
def test_compilers_see_one_device_per_chip(monkeypatch, name):
    target = targets.parse(name)
    if not INSTALLED[target.chip.kind]:
        pytest.skip(f"the compiler for {target.chip.generation} is not installed")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    data, model = targets.splits(target)[-1]
    mesh = topologies.make_mesh(target, data, model)
    assert mesh.devices.size == target.num_chips
    assert dict(mesh.shape) == {"data": data, "model": model}
