"""Plans: what each platform is given, and that only the plan that will run is traced."""

import ast
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mogrifier_jax import partitioning
from mogrifier_jax.nn import layers, plans, rnn
from tests import quick

T, B, D, H = 5, 3, 4, 6
BF16 = plans.BFLOAT16
MIB = 2**20


def sizes_of(cell, steps=T, batch=B, features=D):
    """The sizes from which the plan of a layer is made."""
    asked = []

    def make_plan(platform, sizes):
        asked.append(sizes)
        return plans.Plan()

    def run(xs):
        return rnn.RNN(cell, time_major=True).init_with_output(jax.random.key(0), xs)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "make_plan", make_plan)
        jax.eval_shape(
            run, jax.ShapeDtypeStruct((steps, batch, features), cell.dtype or jnp.float32)
        )
    (sizes,) = set(asked)
    return sizes


def on_tpus(sizes, devices=1):
    """The fields of a TPU's plan that are not the defaults."""
    make = quick.on_platform("tpu", lambda: plans.make_plan("tpu", sizes), devices)
    default = dataclasses.asdict(plans.Plan())
    fields = dataclasses.asdict(make())
    return {name: value for name, value in fields.items() if value != default[name]}


LSTM = layers.LSTMCell(H)
MOGRIFIER = layers.MogrifierLSTMCell(H, rounds=5, rank=2)


def test_sizes_are_those_of_the_maps_of_a_step():
    sizes = sizes_of(MOGRIFIER)
    assert sizes == plans.Sizes(
        dtype=np.dtype(np.float32),
        steps=T,
        rows=B,
        large_outputs=4 * H,  # The rounds are thin.
        num_maps=6,
        maps_read_inputs=True,
        projects_inputs=False,
        carry_parts_alike=True,
        resets=False,
        one_device=True,
    )
    lstm = sizes_of(LSTM)
    assert (lstm.num_maps, lstm.maps_read_inputs, lstm.projects_inputs) == (1, False, True)
    full = sizes_of(layers.MogrifierLSTMCell(H, rounds=2))
    assert full.large_outputs == 4 * H + D + H
    assert sizes_of(layers.MLSTMCell(H)).num_maps == 2
    assert not sizes_of(layers.MogrifierGRUCell(H)).carry_parts_alike
    assert not sizes_of(layers.LSTMCell(H, dtype=jnp.bfloat16)).carry_parts_alike


def test_cpus_project_inputs_in_the_step_if_there_is_a_projection():
    assert plans.make_plan("cpu", sizes_of(LSTM)) == plans.Plan(project_inputs_in_step=True)
    assert plans.make_plan("cpu", sizes_of(MOGRIFIER)) == plans.Plan()


def test_cpus_write_over_outputs_and_join_rows_if_there_are_resets():
    sizes = dataclasses.replace(sizes_of(MOGRIFIER), resets=True)
    plan = plans.Plan(overwrite_outputs=True, flatten_rows=True)
    assert plans.make_plan("cpu", sizes) == plan
    plan = dataclasses.replace(plan, flatten_rows=False)
    assert plans.make_plan("cpu", dataclasses.replace(sizes, one_device=False)) == plan


def test_a_mesh_of_several_devices_is_seen_from_what_it_holds():
    assert plans.on_one_device(jnp.ones(2)) and plans.on_one_device([])
    found = []

    def run(x):
        found.append(plans.on_one_device({"x": x}))
        return x

    for devices in (1, 2):
        mesh = jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])
        spec = jax.sharding.PartitionSpec("rows")
        jax.jit(run)(jax.device_put(np.ones(2), jax.sharding.NamedSharding(mesh, spec)))
        with jax.set_mesh(mesh):
            run(0)
    assert found == [True, True, False, False]


def test_gpus_pack_and_multiply_if_maps_read_inputs():
    plan = plans.Plan(
        factor_product_bytes=16 * MIB, product_alignment=128, inner_alignment=8, pack_results=True
    )
    assert plans.make_plan("cuda", sizes_of(MOGRIFIER)) == plan
    assert plans.make_plan("cuda", sizes_of(LSTM)) == plans.Plan(inner_alignment=8)
    assert plans.make_plan("rocm", sizes_of(MOGRIFIER)) == plans.Plan()


FORWARD = dict(operands_forward=BF16)
BOTH = FORWARD | dict(operands_backward=BF16)
ALIGNED = dict(output_alignment=128)
SMALL = BOTH | ALIGNED
LARGE = BOTH | ALIGNED | dict(recompute_thin_outputs=True)


@pytest.mark.parametrize(
    "stored, expected",
    [
        (2**22, SMALL),
        (2**22 + 2, LARGE | dict(backward_chunk=16)),
        (2**25, LARGE | dict(backward_chunk=16)),
        (2**25 + 2, LARGE | dict(stack_carries=True)),
    ],
)
def test_tpus_are_given_by_how_much_a_device_stores(stored, expected):
    sizes = dataclasses.replace(sizes_of(MOGRIFIER), steps=1, rows=2, large_outputs=stored // 2)
    assert on_tpus(sizes) == expected
    # A batch of four times the rows on four devices is the same on each.
    assert on_tpus(dataclasses.replace(sizes, rows=8), devices=4) == expected
    twice = dataclasses.replace(sizes, rows=4)
    assert on_tpus(dataclasses.replace(sizes, rows=8), devices=2) == on_tpus(twice) != SMALL
    alone = dataclasses.replace(sizes, carry_parts_alike=False)
    assert "stack_carries" not in on_tpus(alone)


def test_tpus_have_other_plans_for_maps_of_h_alone_single_rows_and_other_dtypes():
    assert on_tpus(sizes_of(LSTM)) == FORWARD
    assert on_tpus(sizes_of(layers.MLSTMCell(H))) == BOTH
    assert on_tpus(sizes_of(LSTM, batch=1)) == FORWARD | dict(rows_from_one=8)
    assert on_tpus(sizes_of(LSTM, batch=2), devices=2) == FORWARD | dict(rows_from_one=8)
    bfloat16 = sizes_of(layers.MogrifierLSTMCell(H, dtype=jnp.bfloat16))
    assert on_tpus(bfloat16) == SMALL
    with jax.default_matmul_precision("highest"):
        assert on_tpus(sizes_of(MOGRIFIER)) == ALIGNED
    # Padded rows count.
    single = dataclasses.replace(sizes_of(MOGRIFIER), steps=1, rows=1, large_outputs=2**22)
    assert on_tpus(single) == LARGE | dict(backward_chunk=16, rows_from_one=8)


def test_tpus_that_share_features_do_not_align_them():
    auto = (jax.sharding.AxisType.Auto,) * 2
    for size, expected in ((1, 128), (2, 1)):
        mesh = jax.sharding.AbstractMesh((2, size), ("data", "model"), axis_types=auto)
        with jax.sharding.use_abstract_mesh(mesh):
            assert plans.make_plan("tpu", sizes_of(MOGRIFIER)).output_alignment == expected


# Which platform.


def sharded_on(platform):
    """The type of an array that is sharded over devices of a platform."""
    sharding = NamedSharding(plans.abstract_mesh(platform, devices=2), PartitionSpec())
    return jax.ShapeDtypeStruct((4, 2), np.float32, sharding=sharding)


def traced_platforms(*arguments, inside=lambda fn: fn):
    seen = []

    def look(*operands):
        seen.append(plans.platforms(operands))
        return operands

    jax.eval_shape(inside(look), *arguments)
    return seen[0]


X = jax.ShapeDtypeStruct((4, 2), np.float32)


def test_a_sharding_or_a_mesh_names_the_platform(several_backends):
    assert traced_platforms(X) == ("cpu", "cuda", "tpu")
    for platform, name in (("cpu", "cpu"), ("tpu", "tpu"), ("gpu", "cuda")):
        assert traced_platforms(X, {"w": sharded_on(platform)}) == (name,)
        assert traced_platforms(X, inside=lambda f, p=platform: quick.on_platform(p, f)) == (name,)


def test_arrays_on_a_mesh_and_what_is_computed_from_them_name_the_platform(several_backends):
    mesh = partitioning.make_mesh(2, 1, jax.devices()[:2])
    on_mesh = jax.device_put(np.ones((4, 2), np.float32), partitioning.replicated(mesh))
    seen = []

    def look(x, w):
        y = jnp.tanh(x @ w.T).astype(jnp.bfloat16)
        seen.append((plans.platforms(x), plans.platforms(y)))
        return y

    jax.jit(look)(on_mesh, np.ones((3, 2), np.float32))
    jax.jit(look)(jax.device_put(np.ones((4, 2)), jax.devices()[1]), np.ones((3, 2), np.float32))
    assert seen == [(("cpu",), ("cpu",)), (("cpu", "cuda", "tpu"),) * 2]
    with jax.set_mesh(mesh):
        assert traced_platforms(X) == ("cpu",)
        # JAX holds the program to the mesh, so the plan cannot run elsewhere.
        elsewhere = jax.device_put(np.ones((4, 2)), jax.devices()[5])
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(jnp.sin)(elsewhere)


def test_a_process_without_accelerators_traces_one_plan():
    assert traced_platforms(X) == ("cpu",)


def gradient(cell=LSTM):
    """The gradient of a layer, and its arguments."""
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((T, B, D)).astype(np.float32)
    layer = rnn.RNN(cell, time_major=True)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), xs)
    variables = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), shapes)
    return jax.grad(lambda v, xs: jnp.sin(layer.apply(v, xs)).sum(), (0, 1)), (variables, xs)


def test_an_unknown_platform_is_chosen_when_the_program_is_lowered(several_backends):
    function, arguments = gradient()
    program = jax.jit(function).trace(*arguments)
    assert "platform_index" in str(program.jaxpr)
    texts = {name: program.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu")}
    assert "bf16" in texts["tpu"] and "bf16" not in texts["cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [LSTM, MOGRIFIER])
def test_arrays_on_the_cpu_of_a_host_with_a_tpu_are_computed_as_on_a_cpu(cell, request):
    function, arguments = gradient(cell)
    alone = quick.jit(function)(*arguments)
    assert "platform_index" not in str(jax.make_jaxpr(function)(*arguments))
    request.getfixturevalue("several_backends")
    function, _ = gradient(cell)
    assert "platform_index" in str(jax.make_jaxpr(function)(*arguments))
    for a, b in zip(*map(jax.tree.leaves, (quick.jit(function)(*arguments), alone)), strict=True):
        np.testing.assert_array_equal(a, b)
    on_tpu = quick.jit(quick.on_platform("tpu", function))(*arguments)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (on_tpu, alone)), strict=True))


def test_the_program_of_a_mesh_has_one_plan(several_backends):
    function, arguments = gradient()
    for platform in ("cpu", "tpu"):
        program = str(jax.make_jaxpr(quick.on_platform(platform, function))(*arguments))
        assert "platform_index" not in program
        assert ("bf16" in program) == (platform == "tpu")


def test_of_no_platform_is_the_default_plan(several_backends):
    function, arguments = gradient(MOGRIFIER)
    with plans.of_no_platform():
        program = str(jax.make_jaxpr(function)(*arguments))
    assert "platform_index" not in program and "bf16" not in program


def platform_names(source):
    """The platforms that a source names in its code."""
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, "value", None), getattr(node, "arg", None)]
        yield from {"cpu", "cuda", "tpu", "gpu"} & {n for n in names if isinstance(n, str)}


def test_plans_alone_name_platforms():
    room = pathlib.Path(plans.__file__).parent
    named = {path.name for path in room.glob("*.py") if [*platform_names(path.read_text())]}
    assert named == {"plans.py"}
    assert [*platform_names("jax.lax.platform_dependent(x, tpu=f, default=g)")] == ["tpu"]
