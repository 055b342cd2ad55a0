"""The fast path against the plain one: values, gradients, dtypes, and what is in the loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from mogrifier_jax import partitioning
from mogrifier_jax.nn import cells, layers, plans, rnn, taps
from tests import quick, reference

T, B, D, H = 6, 3, 4, 5
LENGTHS = (6, 4, 5)
PLATFORMS = ("cpu", "cuda", "tpu")
# Switches that do not matter to the recurrence are left to the cells' own tests.
VARIANTS = [
    name
    for name in reference.VARIANTS
    if name not in ("lstm uncapped", "lstm tied", "lstm clipped", "mogrifier no bias", "elman")
]


def make_cell(variant, hidden_size=H, **more):
    name, options = reference.VARIANTS[variant]
    return layers.CELLS[name](hidden_size, **{**options, **more}, parent=None)


def problem(cell, input_size=D, steps=T, batch=B):
    """Parameters, carry, xs; a mask for each step; which steps are within the examples."""

    def init(key):
        carry = cell.initialize_carry(key, (batch, input_size))
        carry = cell.to_state(carry, jnp.float32)
        xs = jnp.zeros((1, batch, input_size), cell.dtype)
        return rnn.RNN(cell).init(key, carry, xs, method="window")["params"], carry

    shapes = jax.eval_shape(init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params, carry = jax.tree.map(lambda a: 0.5 * rng.standard_normal(a.shape), shapes)
    xs = rng.standard_normal((steps, batch, input_size))
    keep = rng.random((steps, batch, cell.features)) < 0.7
    valid = np.arange(steps)[:, None] < np.array(LENGTHS[:batch])
    return (params, carry, xs), keep, valid


def objective(layer):
    """A scalar of all that a layer returns."""

    def value(tree, keep, valid):
        params, carry, xs = tree
        scale = None if keep is None else jnp.asarray(1 / 0.7, xs.dtype)
        carry, ys = layer.apply({"params": params}, carry, xs, keep, scale, valid, method="window")
        weights = jnp.cos(jnp.arange(ys.size)).reshape(ys.shape).astype(ys.dtype)
        ends = sum(jnp.cos(leaf).sum().astype(ys.dtype) for leaf in jax.tree.leaves(carry))
        return (weights * ys).sum() + ends, (carry, ys)

    return value


@functools.cache
def compiled(variant, **layer_options):
    cell = make_cell(variant, dtype=jnp.float64, param_dtype=jnp.float64)
    layer = rnn.RNN(cell, **layer_options)
    return quick.jit(jax.value_and_grad(objective(layer), has_aux=True))


def solve(variant, tree, keep, valid, **layer_options):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        return jax.device_get(compiled(variant, **layer_options)(tree, keep, valid))


def assert_equal(found, expected, rtol=1e-10, atol=1e-12):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("variant", quick.mostly_slow(VARIANTS, "mogrifier low rank"))
def test_fast_path_equals_plain_path(variant):
    tree, keep, valid = problem(make_cell(variant))
    fast = solve(variant, tree, keep, valid)
    plain = solve(variant, tree, keep, valid, fast=False)
    assert_equal(fast, plain)
    (_, (_, ys)), grads = fast
    assert (ys[4:, 1] == 0).all() and (ys[:4] != 0).all()
    assert all(abs(leaf).max() > 1e-5 for leaf in jax.tree.leaves(grads))
    other = solve(variant, tree, ~keep, valid, fast=False)
    assert abs(other[0][0] - plain[0][0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, options",
    [
        ("lstm", {"remat_window": 4, "unroll": 2}),
        ("lstm", {"fast": False, "unroll": 2}),
        ("mogrifier gru", {"remat_window": 2}),
        ("mogrifier gru", {"remat_window": 4}),
        ("mlstm", {"remat_window": 5}),
        ("rewired", {"remat_window": 4, "unroll": 2}),
    ],
)
def test_chunks_and_unrolling_change_nothing(variant, options):
    tree, keep, valid = problem(make_cell(variant))
    expected = solve(variant, tree, keep, valid)
    assert_equal(solve(variant, tree, keep, valid, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mlstm", "mogrifier", "rewired"])
def test_one_mask_for_the_window_is_the_same_mask_at_each_step(variant):
    tree, keep, valid = problem(make_cell(variant))
    repeated = np.broadcast_to(keep[0], keep.shape)
    expected = solve(variant, tree, repeated, valid, fast=False)
    assert_equal(solve(variant, tree, keep[0], valid, fast=variant == "mlstm"), expected)
    assert_equal(solve(variant, tree, keep[0], valid, remat_window=4), expected)
    assert abs(solve(variant, tree, keep, valid, fast=False)[0][0] - expected[0][0]) > 1e-3


def test_two_windows_equal_one_long_window():
    variant = "mogrifier low rank"
    (params, carry, xs), keep, valid = problem(make_cell(variant))
    run = functools.partial(solve, variant)
    (_, (end, ys)), _ = run((params, carry, xs), keep, valid)
    (_, (middle, first)), _ = run((params, carry, xs[:3]), keep[:3], valid[:3])
    (_, (last, second)), _ = run((params, middle, xs[3:]), keep[3:], valid[3:])
    assert_equal((last, np.concatenate([first, second])), (end, ys))
    (_, (restarted, _)), _ = run((params, carry, xs[3:]), keep[3:], valid[3:])
    assert abs(restarted.h - end.h).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, fast",
    [
        (name, True)
        for name in ("lstm", "mogrifier all", "mlstm", "mogrifier gru", "mogrifier rewired")
    ]
    + [("mogrifier all", False)],
)
def test_bfloat16_is_close_and_keeps_c_and_gradients_in_float32(variant, fast, strict_dtypes):
    tree, keep, valid = problem(make_cell(variant))
    (_, (_, expected)), (d_expected, _, _) = solve(variant, tree, keep, valid)
    params, carry, xs = jax.tree.map(np.float32, tree)
    carry = carry._replace(h=carry.h.astype(jnp.bfloat16))
    layer = rnn.RNN(make_cell(variant, dtype=jnp.bfloat16), fast=fast)
    run = quick.jit(jax.value_and_grad(objective(layer), has_aux=True))
    found = jax.device_get(run((params, carry, xs.astype(jnp.bfloat16)), keep, valid))
    (_, (carry, ys)), (d_params, d_carry, d_xs) = found
    assert ys.dtype == carry.h.dtype == d_carry.h.dtype == d_xs.dtype == jnp.bfloat16
    if isinstance(carry, cells.LSTMCarry):
        assert carry.c.dtype == d_carry.c.dtype == np.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(d_params)} == {np.dtype(np.float32)}
    # A bfloat16 has 8 bits: 0.4 % for each rounding, of which a step makes a few.
    np.testing.assert_allclose(ys.astype(np.float32), expected, atol=0.03)
    assert abs(ys.astype(np.float32) - expected).max() > 1e-4
    for a, b in zip(jax.tree.leaves(d_params), jax.tree.leaves(d_expected), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


def scans(jaxpr):
    """All the scans in a program, those within others too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from scans(inner)


def arrays(jaxpr):
    """The sizes of all that a program computes."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in core.jaxprs_in_params(equation.params):
            yield from arrays(inner)


def gradient_program(cell, tree, on="cpu", devices=1, **options):
    """The gradient as it is traced for a platform."""
    gradient = jax.grad(objective(rnn.RNN(cell, **options)), has_aux=True)
    gradient = quick.on_platform(on, gradient, devices)
    return jax.make_jaxpr(gradient)(jax.tree.map(np.float32, tree), None, None).jaxpr


def carried_sizes(jaxpr):
    """Sizes of what the scans of a program carry: results that have no axis of time."""
    return {
        result.aval.size
        for scan in scans(jaxpr)
        for result, of_step in zip(scan.outvars, scan.params["jaxpr"].out_avals, strict=True)
        if result.aval.shape == of_step.shape
    }


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "normed" not in name])
def test_backward_scan_accumulates_no_weight_gradients(variant):
    # Primes, so that a size tells what an array is.
    cell = make_cell(variant, hidden_size=13)
    tree, _, _ = problem(cell, input_size=11)
    matrices = {
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(tree[0])
        if path[-1].key in ("kernel", "down", "up", "input", "recurrent")
    }
    state = tree[1].h.size
    plain = carried_sizes(gradient_program(cell, tree, fast=False))
    assert state in plain and matrices <= plain
    for platform in PLATFORMS:
        fast = carried_sizes(gradient_program(cell, tree, on=platform))
        assert state in fast and not matrices & fast


@pytest.mark.parametrize("platform", quick.mostly_slow(PLATFORMS, "tpu"))
def test_remat_keeps_less(platform):
    cell = make_cell("mogrifier low rank", hidden_size=13)
    # Long enough for its outputs to be larger than a matrix whose outputs a TPU fills up to 128.
    tree, _, _ = problem(cell, input_size=11, steps=256, batch=2)
    program = functools.partial(gradient_program, cell, tree, on=platform)
    whole, chunked = (max(arrays(program(**options))) for options in ({}, {"remat_window": 8}))
    gates = 256 * 2 * 4 * 13
    assert chunked < gates <= whole


@pytest.mark.slow
def test_remat_needs_less_memory():
    cell = make_cell("mogrifier low rank", hidden_size=64)
    tree, _, _ = problem(cell, input_size=64, steps=128, batch=2)
    needed = {}
    for window in (None, 16):
        layer = rnn.RNN(cell, remat_window=window)
        gradient = quick.jit(jax.grad(objective(layer), has_aux=True))
        memory = (
            gradient.lower(jax.tree.map(np.float32, tree), None, None).compile().memory_analysis()
        )
        needed[window] = memory.temp_size_in_bytes
    assert needed[16] < 0.5 * needed[None]


# Gains and shifts of layer norm have a row for each gate, but they are not multiplied by.
VECTORS = ("input_gain", "recurrent_gain", "shift")


def matrices_of(tree):
    """The leaves with two or more axes by their names."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    wide = [(path, leaf) for path, leaf in flat if leaf.ndim >= 2 and path[-1].key not in VECTORS]
    return {jax.tree_util.keystr(path): leaf for path, leaf in wide}


def unknown_to_taps(weights):
    """Matrices whose gradient would be summed up at its full size at every step back."""
    weights = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), weights)
    vectors = taps.Taps(weights, jnp.dtype(jnp.float32)).vectors
    return [name for name in matrices_of(weights) if name in vectors]


def unknown_to_partitioning(params):
    """Matrices that would lie whole on every device, as their axes have no names."""
    placed, _ = jax.tree_util.tree_flatten_with_path(
        partitioning.shardings(params, partitioning.make_mesh(4, 2))
    )
    named_axes = {jax.tree_util.keystr(path): len(sharding.spec) for path, sharding in placed}
    return [name for name, leaf in matrices_of(params).items() if named_axes[name] != leaf.ndim]


@pytest.mark.parametrize("variant", reference.VARIANTS)
def test_taps_and_logical_axes_know_every_matrix(variant):
    cell = make_cell(variant, hidden_size=6)
    declare = functools.partial(cell.init_with_output, input_size=D, method="weights")
    weights, variables = jax.eval_shape(declare, jax.random.key(0))
    scanned, _ = jax.eval_shape(cells.split_input_projection, weights)
    params = variables["params"]
    assert len(matrices_of(params)) == len(matrices_of(weights)) >= 2
    assert unknown_to_taps(weights) == unknown_to_taps(scanned) == []
    assert unknown_to_partitioning(params) == []
    # A matrix of another name is seen.
    known = "up" if "up" in params["gates"] else "recurrent"
    renamed = {("state" if name == known else name): x for name, x in params["gates"].items()}
    if known == "recurrent":
        assert unknown_to_taps({**weights, "gates": renamed}) == ["['gates']['state']"]
    assert unknown_to_partitioning({**params, "gates": renamed}) == ["['gates']['state']"]


def test_every_cell_has_a_variant():
    assert {name for name, _ in reference.VARIANTS.values()} == layers.CELLS.keys()


MANY = 2**30  # Bytes that no test has.
# What platforms are given for windows of several sizes, in chunks that are short enough for T.
TPU = plans.Plan(output_alignment=128)
PLANS = {
    "default": plans.Plan(),
    "small on a TPU": TPU,
    "middle on a TPU": dataclasses.replace(TPU, recompute_thin_outputs=True, backward_chunk=4),
    "large on a TPU": dataclasses.replace(TPU, recompute_thin_outputs=True, stack_carries=True),
    "GPU": plans.Plan(
        factor_product_bytes=MANY, product_alignment=128, inner_alignment=8, pack_results=True
    ),
    "CPU with resets": plans.Plan(overwrite_outputs=True, flatten_rows=True),
}


def solve_by(plan, monkeypatch, variant, tree, keep, valid, dtype=jnp.float64):
    """As `solve`, by a plan that this platform is not given."""
    cell = make_cell(variant, dtype=dtype, param_dtype=dtype)
    with monkeypatch.context() as patch, jax.enable_x64(dtype == jnp.float64):
        patch.setattr(plans, "make_plan", lambda platform, sizes: plan)
        gradient = jax.value_and_grad(objective(rnn.RNN(cell)), has_aux=True)
        return jax.device_get(quick.jit(gradient)(tree, keep, valid))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "variant",
    [
        *("lstm", "mogrifier low rank", "mogrifier gru", "mlstm"),
        *("rewired", "mogrifier rewired low rank"),
    ],
)
def test_every_plan_gives_the_same_numbers(variant, name, monkeypatch):
    tree, keep, valid = problem(make_cell(variant))
    found = solve_by(PLANS[name], monkeypatch, variant, tree, keep, valid)
    assert_equal(found, solve(variant, tree, keep, valid))


@pytest.mark.slow
def test_every_field_of_a_plan_changes_the_program(monkeypatch):
    """So none of them is forgotten; the values are those that some platform is given."""
    cell = make_cell("mogrifier low rank", hidden_size=13)
    tree, _, _ = problem(cell, input_size=11)

    def program(**fields):
        monkeypatch.setattr(plans, "make_plan", lambda platform, sizes: plans.Plan(**fields))
        return str(gradient_program(cell, tree))

    default = program()
    assert program() == default
    for fields in (
        dict(rows_from_one=8),
        dict(operands_forward=plans.BFLOAT16),
        dict(operands_backward=plans.BFLOAT16),
        dict(output_alignment=128),
        dict(stack_carries=True),
        dict(recompute_thin_outputs=True),
        dict(backward_chunk=3),
        dict(factor_product_bytes=MANY),
        dict(inner_alignment=8),
        dict(pack_results=True),
        dict(overwrite_outputs=True),
        dict(flatten_rows=True),
    ):
        assert program(**fields) != default, fields
    products = dict(factor_product_bytes=MANY)
    assert program(**products, product_alignment=128) != program(**products)
    cell = make_cell("lstm", hidden_size=13)
    tree, _, _ = problem(cell, input_size=11)
    assert program(project_inputs_in_step=True) != program()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lstm", "gru", "mlstm", "mogrifier low rank", "rewired"])
def test_gradients_are_written_over_what_the_backward_loop_reads(variant, monkeypatch):
    """The program needs less memory by one of them; a step that copied them would need as much."""
    cell, batch = make_cell(variant, hidden_size=13), 16
    tree, _, _ = problem(cell, input_size=11, batch=batch)
    tree = jax.tree.map(np.float32, tree)

    def compile_by(plan):
        monkeypatch.setattr(plans, "make_plan", lambda platform, sizes: plan)
        gradient = jax.grad(objective(rnn.RNN(cell)), has_aux=True)
        return jax.jit(gradient).lower(tree, None, None).compile()

    overwriting, apart = compile_by(plans.Plan(overwrite_outputs=True)), compile_by(plans.Plan())
    saved = (
        apart.memory_analysis().temp_size_in_bytes
        - overwriting.memory_analysis().temp_size_in_bytes
    )
    assert saved >= 4 * T * batch * 13


def test_loops_on_gpus_read_matrices_whose_inner_axis_is_filled_up():
    cell = make_cell("mogrifier", hidden_size=13)
    tree, _, _ = problem(cell, input_size=12)

    def read_by_loops(on):
        program = gradient_program(cell, tree, on=on)
        return [{variable.aval.shape for variable in scan.invars} for scan in scans(program)]

    for on, shapes in (
        ("cpu", [{(25, 4, 13), (12, 13)}, {(4, 13, 25), (12, 13)}]),
        ("gpu", [{(32, 4, 13), (16, 13)}, {(4, 16, 25), (16, 13)}]),
    ):
        for expected, found in zip(shapes, read_by_loops(on), strict=True):
            assert expected <= found, on


def rows(program):
    """How many rows what goes through the scans of a program has."""
    inputs = (variable.aval for scan in scans(program) for variable in scan.invars)
    return {aval.shape[1] for aval in inputs if aval.ndim == 3 and aval.shape[0] == T}


@pytest.mark.parametrize(
    "batch, devices, expected", [(1, 1, {8}), (2, 2, {16}), (3, 1, {3}), (2, 1, {2})]
)
def test_single_rows_of_a_device_are_padded_on_tpus(batch, devices, expected):
    cell = make_cell("lstm", hidden_size=13)
    tree, _, _ = problem(cell, input_size=11, batch=batch)
    for platform, padded in (("cpu", {batch}), ("tpu", expected)):
        assert rows(gradient_program(cell, tree, on=platform, devices=devices)) == padded


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lstm", "mogrifier low rank", "lstm normed"])
def test_padded_rows_change_no_number(variant, monkeypatch):
    tree, keep, valid = problem(make_cell(variant), batch=1)
    expected = solve(variant, tree, keep, valid)
    run = functools.partial(solve_by, plans.Plan(rows_from_one=8), monkeypatch, variant)
    assert_equal(run(tree, keep, valid), expected)
    # Rows that stand elsewhere are not those that are taken out again.
    pad = jnp.pad
    monkeypatch.setattr(jnp, "pad", lambda a, widths: pad(a, [w[::-1] for w in widths]))
    with pytest.raises(AssertionError):
        assert_equal(run(tree, keep, valid), expected)


@pytest.mark.slow
def test_operands_are_bfloat16_on_tpus_unless_more_is_asked_for():
    variant = "mogrifier low rank"
    tree, keep, valid = problem(make_cell(variant))
    tree = jax.tree.map(np.float32, tree)
    gradient = jax.value_and_grad(objective(rnn.RNN(make_cell(variant))), has_aux=True)
    _, expected = quick.jit(gradient)(tree, keep, valid)

    def distance(platform, precision):
        with jax.default_matmul_precision(precision):
            run = quick.jit(quick.on_platform(platform, gradient))
            found = jax.device_get(run(tree, keep, valid)[1])
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return max(abs(a - b).max() / abs(b).max() for a, b in pairs)

    assert distance("tpu", "highest") < 1e-5
    assert 1e-4 < distance("tpu", "default") < 3e-2
    assert distance("cpu", "default") < 1e-6
