"""Matmul and convolution FLOPs of a traced function, counted without a compiler."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend


def count_flops(jaxpr: jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr) -> int:
    """Matmul and convolution FLOPs of a traced function, loops and recomputation included.

    The count is exact and the same on every backend, whereas compilers rewrite matmuls, so that
    compiled programs give different counts.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [count_flops(sub) for sub in _subjaxprs(params)]
        if name == "dot_general":
            total += _dot_general(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "shard_map":
            total += params["mesh"].size * sum(inner)  # The body is the work of one shard.
        elif name == "cond" and params.get("branches_platforms"):
            # Each platform has its branch, and all of them compute the same result.
            total += min(inner)
        elif name == "cond":
            total += max(inner)
        elif name == "while" and any(inner):
            raise ValueError("a while loop with matmuls has no static FLOP count; use lax.scan")
        else:
            total += sum(inner)
    return total


def _subjaxprs(
    params: dict[str, Any],
) -> Iterator[jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr]:
    """Every jaxpr among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield item


def _dot_general(equation: Any) -> int:
    """Two FLOPs for each product, as every output element sums over the contracted axes."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    """Two FLOPs for each product: output elements times window size times input features."""
    numbers = equation.params["dimension_numbers"]
    kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(out) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
