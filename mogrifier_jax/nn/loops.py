"""Loops that `recurrence.py` runs in place of `lax.scan`.

Axes: T time, B batch.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

# The most bytes that `scan_into_empty` writes into memory that is not filled with zeros.
TPU_EMPTY = 2**27


def shards():
    """How many devices share the batch; 1 if the mesh is not known while this is traced."""
    return jax.sharding.get_abstract_mesh().shape.get("data", 1)


def scan_into_empty(body, init, xs, reverse=False, unroll=1):
    """`lax.scan` that writes its results into memory without filling it with zeros first.

    For large results it is `lax.scan` itself. XLA allocates the empty memory long before the loop,
    and may take the fast memory for it.
    """
    _, like = jax.eval_shape(lambda: jax.lax.scan(body, init, xs))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    if size // shards() > TPU_EMPTY:
        return jax.lax.scan(body, init, xs, reverse=reverse, unroll=unroll)

    def turn(carried, x):
        state, index, results = carried
        state, result = body(state, x)
        write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        results = jax.tree.map(write, results, result)
        return (state, index + (-1 if reverse else 1), results), None

    steps = jax.tree.leaves(xs)[0].shape[0]
    start = jnp.asarray(steps - 1 if reverse else 0, jnp.int32)
    results = jax.tree.map(lambda a: jax.lax.empty(a.shape, a.dtype), like)
    carried, _ = jax.lax.scan(turn, (init, start, results), xs, reverse=reverse, unroll=unroll)
    return carried[0], carried[2]


def scan_in_chunks(loop, most, state, xs):
    """Runs a backward loop in chunks; their length divides T and is at most `most`."""
    steps = jax.tree.leaves(xs)[0].shape[0]
    length = max(n for n in range(1, most + 1) if steps % n == 0)
    chunks = jax.tree.map(lambda a: a.reshape(steps // length, length, *a.shape[1:]), xs)
    state, ys = jax.lax.scan(loop, state, chunks, reverse=True)
    return state, jax.tree.map(lambda a: a.reshape(steps, *a.shape[2:]), ys)


def join(tree):
    """Makes one array [B, N] of arrays [B, ...]."""
    return jnp.concatenate([a.reshape(len(a), -1) for a in jax.tree.leaves(tree)], 1)


def part(joined, like):
    """Undoes `join`: makes a tree like `like` of the [T, B, N] from all time steps."""
    leaves, treedef = jax.tree.flatten(like)
    ends = list(itertools.accumulate(math.prod(leaf.shape[2:]) for leaf in leaves))
    parts = jnp.split(joined, ends[:-1], 2)
    return treedef.unflatten(
        part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
    )
