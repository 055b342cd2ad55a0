"""Variants of `lax.scan` with the same results, stored in ways that suit a platform better."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

Tree: TypeAlias = PyTree[jax.Array]
# (state, x) -> (state, result)
Body = Callable[[Tree, Tree], tuple[Tree, Tree]]
# (body, init, xs, *, reverse, unroll) -> (state, results), as `lax.scan`.
Loop = Callable[..., tuple[Tree, Tree]]


def make(
    *,
    pack: bool = False,
    chunk: int | None = None,
    overwrite: bool = False,
) -> Loop:
    """A loop with these options of a plan; without any it is `lax.scan`."""
    loop: Loop = scan_over_inputs if overwrite else jax.lax.scan
    if pack:
        loop = functools.partial(scan_packed, loop)
    if chunk:
        loop = functools.partial(scan_in_chunks, loop, chunk)
    return loop


def scan_over_inputs(
    body: Body, init: Tree, xs: Tree, *, reverse: bool = False, unroll: int = 1
) -> tuple[Tree, Tree]:
    """Writes results over inputs, in the same memory.

    xs is (inputs, sources) and a result is (outputs, replacements), where sources and replacements
    are dicts. A replacement overwrites the entry of the source of the same name that its step has
    read, if shapes and dtypes agree.
    """
    inputs, sources = xs
    _, (_, like) = jax.eval_shape(lambda: jax.lax.scan(body, init, xs))

    def is_replaced(name: str) -> bool:
        return name in like and (like[name].shape, like[name].dtype) == (
            sources[name].shape,
            sources[name].dtype,
        )

    buffers = {name: source for name, source in sources.items() if is_replaced(name)}
    others = {name: source for name, source in sources.items() if name not in buffers}

    def read(buffers: Tree, index: jax.Array) -> Tree:
        return jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, index, axis=0, keepdims=False), buffers
        )

    def replace(carried: Tree, x: Tree) -> tuple[Tree, Tree]:
        state, index, entries, buffers = carried
        inputs, others = x
        state, (outputs, replacements) = body(state, (inputs, others | entries))
        rest = {name: new for name, new in replacements.items() if name not in buffers}
        buffers = {
            name: jax.lax.dynamic_update_index_in_dim(buffer, replacements[name], index, axis=0)
            for name, buffer in buffers.items()
        }
        # The next entries are read after the write. Otherwise XLA might copy the whole buffer.
        index = index + (-1 if reverse else 1)
        return (state, index, read(buffers, index), buffers), (outputs, rest)

    steps = jax.tree.leaves(xs)[0].shape[0]
    start = jnp.asarray(steps - 1 if reverse else 0, jnp.int32)
    (state, _, _, buffers), (outputs, rest) = jax.lax.scan(
        replace,
        (init, start, read(buffers, start), buffers),
        (inputs, others),
        reverse=reverse,
        unroll=unroll,
    )
    return state, (outputs, rest | buffers)


def scan_packed(loop: Loop, body: Body, init: Tree, xs: Tree, **options: Any) -> tuple[Tree, Tree]:
    """Concatenates the results [B, ...] of a step to one array [B, N], if their dtypes agree."""
    structure: list[Any] = []

    def packed_body(state: Tree, x: Tree) -> tuple[Tree, Tree]:
        state, result = body(state, x)
        leaves, treedef = jax.tree.flatten(result)
        structure[:] = []
        if len({leaf.dtype for leaf in leaves}) > 1:
            return state, result
        structure[:] = [treedef, [leaf.shape[1:] for leaf in leaves]]
        return state, jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], 1)

    state, results = loop(packed_body, init, xs, **options)
    if not structure:
        return state, results
    treedef, shapes = structure
    ends = [sum(map(math.prod, shapes[: i + 1])) for i in range(len(shapes) - 1)]
    parts = jnp.split(results, ends, 2)
    return state, treedef.unflatten(
        part.reshape(*results.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)
    )


def scan_in_chunks(
    loop: Loop,
    most_steps: int,
    body: Body,
    init: Tree,
    xs: Tree,
    **options: Any,
) -> tuple[Tree, Tree]:
    """Runs in chunks, whose length divides T and is at most `most_steps`."""
    steps = jax.tree.leaves(xs)[0].shape[0]
    length = max(n for n in range(1, most_steps + 1) if steps % n == 0)
    chunks = jax.tree.map(lambda a: a.reshape(steps // length, length, *a.shape[1:]), xs)
    run_chunk = functools.partial(loop, body, **options)
    state, ys = jax.lax.scan(run_chunk, init, chunks, reverse=options.get("reverse", False))
    return state, jax.tree.map(lambda a: a.reshape(steps, *a.shape[2:]), ys)
