"""Cells of PyTorch and ours: converted in either direction, they compute the same."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import mogrifier_jax
from mogrifier_jax import errors
from mogrifier_jax.nn import from_pytorch
from tests import quick

T, B, D, H, K = 4, 3, 5, 6, 2


def draw(*shape):
    return np.random.default_rng(sum(shape) + len(shape)).standard_normal(shape) * 0.5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(weights, name, x):
    """`torch.nn.Linear`: weight is [out, in]."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def run(weights, gate, rounds, xs, cell="lstm"):
    """The published PyTorch cell in float64 NumPy: outputs [T, B, H] from a zero state."""
    h, c, hs = np.zeros((B, H)), np.zeros((B, H)), []
    for x in xs:
        for i in range(rounds):
            if i % 2:
                h = 2 * sigmoid(gate(i, x)) * h
            else:
                x = 2 * sigmoid(gate(i, h)) * x
        z = x @ weights[f"{cell}.weight_ih"].T + weights.get(f"{cell}.bias_ih", 0.0)
        z = z + h @ weights[f"{cell}.weight_hh"].T + weights.get(f"{cell}.bias_hh", 0.0)
        i, f, g, o = np.split(z, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        hs.append(h)
    return np.stack(hs)


def make_lstm(bias=True):
    weights = {"lstm.weight_ih": draw(4 * H, D), "lstm.weight_hh": draw(4 * H, H)}
    if bias:
        weights |= {"lstm.bias_ih": draw(4 * H), "lstm.bias_hh": draw(4 * H + 1)[1:]}
    return weights


def make_linear(weights, name, index, bias=True):
    """A map of one round: from h in even ones (counted from 0), from x in odd ones."""
    size_in, size_out = (D, H) if index % 2 else (H, D)
    weights[f"{name}.weight"] = draw(size_out, size_in) + 0.1 * index
    if bias:
        weights[f"{name}.bias"] = draw(size_out) - 0.1 * index


def make_pair(weights, name, index, inner_bias=False):
    size_in, size_out = (D, H) if index % 2 else (H, D)
    weights[f"{name}.0.weight"] = draw(K, size_in) + 0.1 * index
    weights[f"{name}.1.weight"] = draw(size_out, K)
    weights[f"{name}.1.bias"] = draw(size_out)
    if inner_bias:
        weights[f"{name}.0.bias"] = draw(K) + 1.0


def one_list(rounds=5):
    weights = make_lstm()
    for i in range(rounds):
        make_linear(weights, f"mogrifier_list.{i}", i)
    return weights, lambda i, v: linear(weights, f"mogrifier_list.{i}", v), rounds, {}


def long_list():
    return one_list(12)  # The tenth entry sorts behind the second, as text.


def one_list_of_pairs(inner_bias=False):
    weights = make_lstm()
    for i in range(3):
        make_pair(weights, f"mogrifier_list.{i}", i, inner_bias)

    def gate(i, v):
        low = linear(weights, f"mogrifier_list.{i}.0", v)
        return linear(weights, f"mogrifier_list.{i}.1", low)

    return weights, gate, 3, {}


def two_lists(rounds=4):
    weights = make_lstm(bias=False)
    for i in range(rounds):
        make_linear(weights, f"{'QR'[i % 2]}.{i // 2}", i, bias=False)
    return weights, lambda i, v: linear(weights, f"{'QR'[i % 2]}.{i // 2}", v), rounds, {}


def shared_pair():
    weights = make_lstm()
    make_pair(weights, "q", 0)
    make_pair(weights, "r", 1)

    def gate(i, v):
        return linear(weights, f"{'qr'[i % 2]}.1", linear(weights, f"{'qr'[i % 2]}.0", v))

    return weights, gate, 5, {"rounds": 5}


def plain():
    return make_lstm(), None, 0, {}


LAYOUTS = {
    "one list": one_list,
    "more than ten rounds": long_list,
    "one list of low rank": one_list_of_pairs,
    "low rank with a bias inside": functools.partial(one_list_of_pairs, inner_bias=True),
    "two lists": two_lists,
    "two lists, odd": functools.partial(two_lists, 3),
    "shared maps of low rank": shared_pair,
    "no gating": plain,
}
XS = draw(T, B, D)


def run_ours(converted, xs=XS):
    cell, params = converted

    @quick.jit
    def scan(params, xs):
        carry = cell.initialize_carry(None, (B, D))
        return jax.lax.scan(lambda c, x: cell.apply({"params": params}, c, x), carry, xs)[1]

    return scan(params, xs.astype(np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_converted_cells_compute_what_the_original_does(layout):
    weights, gate, rounds, options = LAYOUTS[layout]()
    expected = run(weights, gate, rounds, XS)
    converted = from_pytorch.convert(weights, **options)
    assert converted.cell.rounds == rounds
    assert converted.cell.rank == (K if "rank" in layout else 0)
    np.testing.assert_allclose(run_ours(converted), expected, rtol=1e-4, atol=1e-5)
    shapes = jax.eval_shape(lambda: converted.cell.init(jax.random.key(0), D, method="weights"))
    assert jax.tree.map(np.shape, converted.params) == jax.tree.map(np.shape, shapes["params"])
    # Gates in another order, or rounds that start with h, would be seen.
    rows = {key: np.roll(value, H, 0) for key, value in weights.items() if "lstm" in key}
    assert abs(run(weights | rows, gate, rounds, XS) - expected).max() > 1e-2
    if rounds:
        assert abs(run(weights, gate, rounds - 1, XS) - expected).max() > 1e-3


def test_bare_tensors_are_multiplied_from_the_right():
    weights = {"Wih": draw(D, 4 * H), "Whh": draw(H, 4 * H), "bih": draw(4 * H)}
    weights |= {"bhh": draw(4 * H), "Q": draw(H, D), "R": draw(D, H)}
    same = {"lstm.weight_ih": weights["Wih"].T, "lstm.weight_hh": weights["Whh"].T}
    same |= {"lstm.bias_ih": weights["bih"], "lstm.bias_hh": weights["bhh"]}
    expected = run(same, lambda i, v: v @ weights["QR"[i % 2]], 5, XS)
    found = run_ours(from_pytorch.convert(weights, rounds=5))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_cell_of_a_larger_model_is_found_by_its_prefix():
    weights, gate, rounds, _ = one_list(3)
    other = {f"layers.1.{key}": value + 1 for key, value in weights.items()}
    model = {"embedding.weight": draw(7, D)} | other
    model |= {f"layers.0.{key}": value for key, value in weights.items()}
    found = run_ours(from_pytorch.convert(model, prefix="layers.0."))
    expected = run(weights, gate, rounds, XS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        errors.UsageError, match=r"several cells, layers.1.*; choose one by its pre"
    ):
        from_pytorch.convert(model)


def test_fewer_rounds_than_there_are_maps():
    weights, gate, _, _ = one_list(5)
    found = run_ours(from_pytorch.convert(weights, rounds=2))
    np.testing.assert_allclose(found, run(weights, gate, 2, XS), rtol=1e-4, atol=1e-5)


def test_a_single_map_of_any_name_is_a_round_if_it_is_said_to_be_one():
    weights = make_lstm()
    make_linear(weights, "fc", 0)
    found = run_ours(from_pytorch.convert(weights, rounds=1))
    expected = run(weights, lambda i, v: linear(weights, "fc", v), 1, XS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    bare = run_ours(from_pytorch.convert(weights, rounds=0))
    np.testing.assert_allclose(bare, run(weights, None, 0, XS), rtol=1e-4, atol=1e-5)


def change(layout, drop=(), rename=(), **more):
    """The weights of a layout without some keys, with others renamed."""
    weights = {key: value for key, value in layout()[0].items() if key not in drop}
    for old, new in rename:
        weights = {key.replace(old, new): value for key, value in weights.items()}
    return weights | {key.replace("__", "."): value for key, value in more.items()}


@pytest.mark.parametrize(
    ("weights", "options", "words"),
    [
        ({}, {}, r"no LSTM cell among no tensors; expected weight_ih"),
        (change(one_list), {"prefix": "x."}, r"is the prefix right"),
        (
            change(one_list, drop=["lstm.weight_hh"]),
            {},
            r"there is lstm.weight_ih but no weight_hh",
        ),
        (change(plain, lstm__weight_hh=draw(3 * H, H)), {}, r"are not of an LSTM, which has four"),
        (change(shared_pair), {}, r"say how many with rounds"),
        (change(one_list), {"rounds": 6}, r"rounds 6 must be at most 5, the number"),
        (
            change(one_list, mogrifier_list__0__weight=draw(D, D)),
            {},
            r"round 1 has matrices .* take tu",
        ),
        (change(one_list, drop=["mogrifier_list.0.weight"]), {}, r"0.bias .* has no place"),
        (
            change(one_list, drop=["mogrifier_list.1.weight", "mogrifier_list.1.bias"]),
            {},
            r"mogrifier_list has an entry 2 but none 1",
        ),
        (change(one_list, mogrifier_list__0__bias=draw(1)), {}, r"shape \(1,\) must be \(5,\)"),
        (change(plain, lstm__bias_ih=draw(3)), {}, r"bias_ih of shape \(3,\) must be"),
        (change(plain, lstm__weight_ih=draw(4 * H, D) * 1j), {}, r"holds complex.* real numbers"),
        (change(plain, lstm__weight_hh=draw(4 * H)), {}, r"are not of an LSTM"),
        ([], {}, r"a mapping of names to tensors"),
        (change(plain), {"rounds": 5}, r"rounds 5 needs gating maps, and there are none"),
        (change(shared_pair), {"rounds": -1}, r"rounds -1 must be at least 0"),
        (
            change(two_lists, rename=[("Q.", "a."), ("R.", "b.")]),
            {},
            r"maps a, b are not of a known",
        ),
        (change(two_lists, drop=["Q.1.weight"]), {}, r"1 maps for x and 2 for h do not take turns"),
        (change(one_list, norm=draw(D)), {}, r"norm of shape \(5,\) has no place in this cell"),
        (change(plain, fc__weight=draw(D, H)), {}, r"fc may be the map of the only round, or an"),
        (change(plain, head__0__weight=draw(D, H)), {}, r"head may be the map of the only round"),
        (
            # The second layer of a torch.nn.LSTM without biases.
            change(plain, weight_ih_l1=draw(4 * H, H), weight_hh_l1=draw(4 * H, H)),
            {"rounds": 0},
            r"weight_hh_l1 are not of a known layout.* by its prefix",
        ),
    ],
)
def test_what_cannot_be_converted_is_explained(weights, options, words):
    with pytest.raises(errors.UsageError, match=words):
        from_pytorch.convert(weights, **options)


def draw_params(cell, seed=0):
    """Random parameters of a linen cell for D input features."""
    shapes = jax.eval_shape(lambda: cell.init(jax.random.key(0), D, method="weights"))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), shapes["params"])


@pytest.mark.parametrize("gating", ["list", "q_r"])
@pytest.mark.parametrize("recurrence", ["lstm_cell", "lstm", "linears", "tensors"])
@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"rounds": 1},
        {"rounds": 5},
        {"rounds": 4, "rank": K},
        {"rounds": 3, "gate_bias": False},
    ],
    ids=str,
)
def test_a_cell_comes_back_from_pytorch_as_it_went(options, recurrence, gating):
    cell = mogrifier_jax.MogrifierLSTMCell(H, cap_input_gate=False, **options)
    params = draw_params(cell)
    state_dict = from_pytorch.to_pytorch(
        cell, params, recurrence=recurrence, gating=gating, prefix="layers.1."
    )
    assert all(name.startswith("layers.1.") for name in state_dict)
    assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in state_dict.values())
    # A list q without a list r looks like a single list, which is the same for one round.
    converted = from_pytorch.convert(state_dict, prefix="layers.1.")
    assert converted.cell.rounds == cell.rounds and converted.cell.rank == cell.rank
    jax.tree.map(np.testing.assert_array_equal, converted.params, params)


def test_shared_maps_come_back_as_they_went():
    weights, _, rounds, options = shared_pair()
    cell, params = from_pytorch.convert(weights, **options)
    state_dict = from_pytorch.to_pytorch(cell, params, gating="shared")
    assert set(state_dict) == set(weights)
    for name in weights:
        if "lstm.bias" not in name:  # The two biases of PyTorch's LSTM become their sum.
            np.testing.assert_array_equal(state_dict[name], weights[name].astype(np.float32))
    biases = [weights[f"lstm.bias_{side}"] for side in ("ih", "hh")]
    np.testing.assert_allclose(state_dict["lstm.bias_ih"], sum(biases), rtol=1e-6)
    assert not state_dict["lstm.bias_hh"].any()
    params["round_3"] = jax.tree.map(lambda a: a + 1, params["round_3"])
    with pytest.raises(errors.UsageError, match=r"rounds 1 and 3 have different weights"):
        from_pytorch.to_pytorch(cell, params, gating="shared")
    assert len(from_pytorch.to_pytorch(cell, params, gating="q_r")) == 4 + 3 * rounds


def test_the_state_dict_computes_what_our_cell_computes():
    cell = mogrifier_jax.MogrifierLSTMCell(H, rounds=5, cap_input_gate=False)
    params = draw_params(cell)
    weights = from_pytorch.to_pytorch(cell, params)
    found = run(weights, lambda i, v: linear(weights, f"mogrifier_list.{i}", v), 5, XS)
    np.testing.assert_allclose(run_ours((cell, params)), found, rtol=1e-4, atol=1e-5)
    capped = run_ours((cell.copy(cap_input_gate=True), params))
    assert abs(capped - found).max() > 1e-2  # Which is why a capped cell is refused.


def test_a_cell_of_nnx_has_its_parameters_itself():
    cell = mogrifier_jax.nnx.LSTMCell(D, H, cap_input_gate=False, rngs=nnx.Rngs(0))
    state_dict = from_pytorch.to_pytorch(cell)
    expected = from_pytorch.to_pytorch(cell.spec, cell.params())
    assert {name: a.shape for name, a in state_dict.items()} == {
        "weight_ih": (4 * H, D),
        "weight_hh": (4 * H, H),
        "bias_ih": (4 * H,),
        "bias_hh": (4 * H,),
    }
    jax.tree.map(np.testing.assert_array_equal, state_dict, expected)
    # The forget gate is PyTorch's second block and our third.
    forget = state_dict["weight_ih"][H : 2 * H].T
    np.testing.assert_array_equal(forget, cell.params()["gates"]["input"][:, 2])


@pytest.mark.parametrize(
    ("cell", "options", "words"),
    [
        (mogrifier_jax.LSTMCell(H), {}, r"PyTorch has no LSTMCell with cap_input_gate=True; only"),
        (mogrifier_jax.MogrifierGRUCell(H), {}, r"PyTorch has no MogrifierGRUCell, so it cannot"),
        (mogrifier_jax.MLSTMCell(H, cap_input_gate=False), {}, r"PyTorch has no MLSTMCell"),
        (
            mogrifier_jax.LSTMCell(H, cap_input_gate=False, zoneout=0.1, zigzag=False),
            {},
            r"zigzag=False, zoneout=0.1; only one with zigzag=True, zoneout=0.0 can",
        ),
        (None, {"params": {}}, r"params are not those of this LSTMCell; give what its init made"),
        (None, {"params": {"gates": {"input": draw(D, 4, 7)}}}, r"params are not those"),
        (None, {"recurrence": "gru"}, r"recurrence 'gru' is not a layout; use one of lstm_cell"),
        (None, {"gating": 3}, r"gating 3 is not a layout; use one of list, q_r, shared"),
        (None, {"prefix": 3}, r"prefix 3 must be a string"),
        ("a cell", {}, r"'a cell' is not a cell of this package"),
    ],
)
def test_what_pytorch_does_not_have_is_refused(cell, options, words):
    plain_cell = mogrifier_jax.LSTMCell(H, cap_input_gate=False)
    params = draw_params(plain_cell)
    with pytest.raises(errors.UsageError, match=words):
        from_pytorch.to_pytorch(cell or plain_cell, **({"params": params} | options))


def make_torch_cell(torch, rounds, rank):
    """The cell as people write it in PyTorch."""

    def make_map(size_in, size_out):
        if not rank:
            return torch.nn.Linear(size_in, size_out)
        first = torch.nn.Linear(size_in, rank, bias=False)
        return torch.nn.Sequential(first, torch.nn.Linear(rank, size_out))

    class MogrifierLSTMCell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTMCell(D, H)
            sizes = [(D, H) if i % 2 else (H, D) for i in range(rounds)]
            self.mogrifier_list = torch.nn.ModuleList(make_map(*pair) for pair in sizes)

        def forward(self, x, state):
            h, c = state
            for i, gate in enumerate(self.mogrifier_list):
                if i % 2:
                    h = 2 * torch.sigmoid(gate(x)) * h
                else:
                    x = 2 * torch.sigmoid(gate(h)) * x
            return self.lstm(x, (h, c))

    return MogrifierLSTMCell()


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "rank"), [(5, 0), (4, K)])
def test_converted_cells_compute_what_torch_computes(rounds, rank):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = make_torch_cell(torch, rounds, rank)
    state, hs = (torch.zeros(B, H), torch.zeros(B, H)), []
    with torch.no_grad():
        for x in torch.tensor(XS, dtype=torch.float32):
            state = module(x, state)
            hs.append(state[0].numpy())
    found = run_ours(from_pytorch.convert(module.state_dict()))
    np.testing.assert_allclose(found, np.stack(hs), rtol=1e-5, atol=1e-6)
    half = module.to(torch.bfloat16).state_dict()  # NumPy has no such dtype.
    coarse = run_ours(from_pytorch.convert(half))
    assert 1e-6 < abs(coarse - np.stack(hs)).max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "rank"), [(5, 0), (4, K), (0, 0)])
def test_torch_computes_what_our_cell_computes(rounds, rank):
    torch = pytest.importorskip("torch")
    cell = mogrifier_jax.MogrifierLSTMCell(H, rounds=rounds, rank=rank, cap_input_gate=False)
    params = draw_params(cell)
    module = make_torch_cell(torch, rounds, rank) if rounds else torch.nn.LSTMCell(D, H)
    if rank:  # Ours has a bias only after the second factor, as this module does.
        assert module.mogrifier_list[0][0].bias is None

    def run_torch(module):
        state, hs = (torch.zeros(B, H), torch.zeros(B, H)), []
        with torch.no_grad():
            for x in torch.tensor(XS, dtype=torch.float32):
                state = module(x, state)
                hs.append(state[0].numpy())
        return np.stack(hs)

    before = run_torch(module)
    state_dict = from_pytorch.to_pytorch(cell, params)
    module.load_state_dict({name: torch.from_numpy(a) for name, a in state_dict.items()})
    ours = run_ours((cell, params))
    np.testing.assert_allclose(run_torch(module), ours, rtol=1e-4, atol=1e-5)
    assert abs(before - ours).max() > 1e-2
    if not rounds:  # The whole sequence at once, by torch.nn.LSTM.
        layer = torch.nn.LSTM(D, H)
        state_dict = from_pytorch.to_pytorch(cell, params, recurrence="lstm")
        layer.load_state_dict({name: torch.from_numpy(a) for name, a in state_dict.items()})
        with torch.no_grad():
            ys = layer(torch.tensor(XS, dtype=torch.float32))[0]
        np.testing.assert_allclose(ys, ours, rtol=1e-4, atol=1e-5)
