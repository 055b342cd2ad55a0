import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mogrifier_jax.preflight import flops, hlo, instruction_costs

B, N, K, T = 8, 16, 32, 6
MATMUL = 2 * B * K * N


def count(fn, *shapes):
    return flops.count_flops(jax.make_jaxpr(fn)(*[jnp.zeros(shape) for shape in shapes]))


def scan(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=T)[0]


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda x, w: x @ w, [(B, K), (K, N)], MATMUL),
        (lambda x, w: jnp.einsum("tbk,tkn->tbn", x, w), [(T, B, K), (T, K, N)], T * MATMUL),
        (lambda x, w: jax.jit(lambda x, w: x @ w)(x, w) + 1, [(B, K), (K, N)], MATMUL),
        (lambda x, w: jnp.sin(x).sum() + w.sum(), [(B, K), (K, N)], 0),
        (scan, [(K, K), (B, K)], T * 2 * B * K * K),
        # The gradient of each of T matmuls takes two more; a recomputed one runs twice.
        (jax.grad(lambda w, x: scan(w, x).sum()), [(K, K), (B, K)], 3 * T * 2 * B * K * K),
        (
            jax.grad(lambda w, x: jnp.sin(jax.checkpoint(lambda w: jnp.sin(x @ w) @ w)(w)).sum()),
            [(K, K), (B, K)],
            (2 + 1 + 3) * 2 * B * K * K,
        ),
        (
            lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w),
            [(B, K), (K, K)],
            2 * 2 * B * K * K,
        ),
        (
            lambda x, w: lax.platform_dependent(
                x, w, tpu=lambda x, w: x @ w @ w, default=lambda x, w: x @ w
            ),
            [(B, K), (K, K)],
            2 * B * K * K,
        ),
    ],
)
def test_flops_agree_with_hand_counts(fn, shapes, expected):
    assert count(fn, *shapes) == expected


def test_convolution():
    def fn(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC"))

    assert count(fn, (B, T, K), (3, K, N)) == 2 * B * T * N * 3 * K


def test_shard_map_counts_all_shards():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict(in_specs=(P("data"), P()), out_specs=P("data"))
    mapped = jax.shard_map(lambda x, w: x @ w, mesh=mesh, **specs)
    assert count(mapped, (B, K), (K, N)) == MATMUL


def test_a_loop_of_unknown_length_is_refused():
    def fn(x, w):
        return lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ w, x)

    with pytest.raises(ValueError, match="no static FLOP count"):
        count(fn, (B, K), (K, K))


def test_compiled_and_traced_counts_agree():
    w, x = np.ones((K, K), np.float32), np.ones((B, K), np.float32)
    fn = jax.grad(lambda w, x: scan(w, x).sum())
    module = hlo.parse(jax.jit(fn).lower(w, x).compile().as_text())
    total = 0
    for computation in module.computations.values():
        if any("dot" in i.opcode for i in computation.instructions.values()):
            for i in computation.instructions.values():
                if i.opcode == "dot":
                    total += T * sum(
                        d.flops for d in instruction_costs.dots(module, computation, i)
                    )
    assert total == flops.count_flops(jax.make_jaxpr(fn)(w, x)) == 3 * T * 2 * B * K * K
