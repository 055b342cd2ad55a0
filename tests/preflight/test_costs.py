"""Programs in tests/data come from real compilers; only the attributes that are read were kept.

`nested_v5e`: three turns of five matmuls, seven of a loop that counts down from 14 in twos, then a
conditional with one more matmul; [256, 256] weights, [64, 256] rows split over four chips.
`nested_model_v5e`: the same, features split instead, so that each matmul gathers its rows.
`until_v5e`: a loop until the data says so. `scan_h100`: gradient of a scan of six such matmuls.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mogrifier_jax.preflight import costs, flops, memory, targets, topologies

DATA = pathlib.Path(__file__).parents[1] / "data"


def read(name):
    return (DATA / f"{name}.hlo.txt").read_text()


def executions(analysis, part):
    return sorted(c.executions for c in analysis.costs if part in c.name)


def test_nested_loops_multiply():
    analysis = costs.analyse(read("nested_v5e"))
    assert [(loop.trips, loop.entries) for loop in analysis.loops] == [(3, 1), (5, 3), (7, 1)]
    assert executions(analysis, "convolution") == [1, 7, 15]
    outer, inner, countdown = (loop.cycles for loop in analysis.loops)
    assert inner == 15 * (4187 + 1851)  # The matmul and the copy of its result.
    assert inner < outer and outer + countdown < analysis.cycles
    assert analysis.cycles == sum(cost.cycles for cost in analysis.costs) == 142_639
    assert not analysis.unknown_loops


def test_cycles_follow_the_estimates():
    text = read("nested_v5e")
    assert text.count('"estimated_cycles":"4187"') == 3
    dearer = costs.analyse(text.replace('"estimated_cycles":"4187"', '"estimated_cycles":"4188"'))
    assert dearer.cycles == costs.analyse(text).cycles + 15 + 7 + 1


def test_the_dearest_are_found():
    analysis = costs.analyse(read("nested_v5e"))
    first, second = sorted(analysis.costs, key=lambda cost: cost.cycles, reverse=True)[:2]
    assert (first.executions, first.cycles) == (15, 15 * 4187)
    assert first.op_name.endswith("while/body/closed_call/while/body/closed_call/dot_general")
    assert second.cycles == 7 * 4187


def test_collectives_are_counted_with_their_loops():
    analysis = costs.analyse(read("nested_model_v5e"))
    rows = 64 * 256 * 2
    assert analysis.by_kind()["all-gather"] == (23, 23 * rows)
    gathers = [c for c in analysis.collectives if c.kind == "all-gather"]
    assert {c.group_size for c in gathers} == {4}
    assert sum(c.wire_bytes for c in gathers) == 23 * rows * 3 // 4
    # Two sums of one float32 each.
    assert analysis.by_kind()["all-reduce"] == (2, 8)


def test_data_parallel_gathers_nothing():
    assert set(costs.analyse(read("nested_v5e")).by_kind()) == {"all-reduce"}


def test_a_loop_that_data_ends_is_reported():
    (loop,) = costs.analyse(read("until_v5e")).unknown_loops
    assert loop.trips is None and loop.cycles == 2714 + 2019


def test_gpu_programs_have_flops_and_collectives():
    analysis = costs.analyse(read("scan_h100"))
    total = sum(c.executions * c.flops_each for c in analysis.costs)
    assert total == 3 * 6 * 2 * (512 // 8) * 256 * 256
    assert analysis.by_kind() == {"all-reduce": (1, 256 * 256 * 2)}
    assert analysis.collectives[0].group_size == 8
    assert analysis.collectives[0].wire_bytes == 2 * 256 * 256 * 2 * 7 // 8


HAND_WRITTEN = """
HloModule hand_written

%cheap (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} negate(%p), backend_config={"window_config":{"estimated_cycles":"10"}}
}

%dear (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %d = f32[8]{0} tanh(%p.1), backend_config={"window_config":{"estimated_cycles":"30"}}
}

%apart (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p.2), backend_config={"window_config":{"estimated_cycles":"100"}}
}

%fused (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %inside = f32[8]{0} tanh(%p.3), backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %s = f32[2]{0} reduce-scatter(%inside), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

ENTRY %main (x: f32[8], b: pred[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %b = pred[] parameter(1)
  %choice = f32[8]{0} conditional(%b, %x, %x), branch_computations={%cheap, %dear}
  %go = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%choice), calls=%apart
  %end = f32[8]{0} async-done(%go), calls=%apart
  %f = f32[2]{0} fusion(%end), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  %begin = (f32[2]{0}, f32[4]{0}) all-gather-start(%f), replica_groups=[4,2]<=[8], dimensions={0}
  %gathered = f32[4]{0} all-gather-done(%begin)
  %sent = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%gathered), \
source_target_pairs={{0,1},{1,0}}
  %got = f32[4]{0} collective-permute-done(%sent)
  %sum = f32[4]{0} all-reduce(%got), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, to_apply=%cheap
  ROOT %out = f32[4]{0} copy(%sum)
}
"""


def test_branches_pairs_and_fusions_count_once():
    analysis = costs.analyse(HAND_WRITTEN)
    assert {c.name: c.cycles for c in analysis.costs if c.cycles} == {"d": 30, "e": 100, "f": 1000}
    assert analysis.copied_bytes == 16
    assert [(c.kind, c.bytes, c.group_size, c.wire_bytes) for c in analysis.collectives] == [
        ("reduce-scatter", 32, 4, 24),
        ("all-gather", 16, 2, 8),
        ("collective-permute", 16, 2, 16),
        ("all-reduce", 16, 8, 28),
    ]


def test_a_program_compiled_for_v5e_now():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed")
    mesh = topologies.make_mesh(targets.parse("v5e:2x2"), 4, 1)
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def loss(w, x):
        def step(h, _):
            return jnp.tanh(h @ w), None

        return lax.scan(step, x, None, length=9)[0].astype(jnp.float32).sum()

    w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=whole)
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=rows)
    program = jax.jit(jax.grad(loss)).lower(w, x).compile()
    analysis = costs.analyse(program.as_text())
    assert {loop.trips for loop in analysis.loops} == {9}
    # One matmul forward, two backward, nine times each, and the sum of the gradient.
    assert sum(c.executions for c in analysis.costs if "dot_general" in c.op_name) >= 27
    assert analysis.by_kind()["all-reduce"][1] >= 256 * 256 * 2
    assert memory.needed_by(program).arguments == 256 * 256 * 2 + 16 * 256 * 2
    assert flops.count_flops(jax.make_jaxpr(jax.grad(loss))(w, x)) == 27 * 2 * 64 * 256 * 256
