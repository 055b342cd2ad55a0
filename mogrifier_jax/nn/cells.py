"""The equations of the cells and their gates, as pure functions of (params, carry, x).

Axes: *B any leading axes (usually one, the batch), D input features, H hidden features, G gates,
K rank, I and *O inputs and outputs of a matrix. A function here computes one step. `layers.py`
declares the parameters, and `recurrence.py` scans over time.

Every cell is a function `cell(params, carry, x, keep=None, scale=None) -> (carry, gates)`, whose
output is the new `carry.h`. `gates` holds the values of all gates, for analysis; XLA removes them
where they are not used. `keep` is the mask of the state dropout (bool, shaped like h), and `scale`
is 1 / (1 - rate). They apply to the state that the gates read, never to the stored state.

`params` is a nested dict. Its matrices are only multiplied in `project` and `affine`, because
`recurrence.py` puts taps in their place, which take over the matmuls.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

# A nested dict of arrays, or of taps in their place, with a list for the rounds.
Params = Mapping[str, Any]
Gates = dict[str, Any]
# An elementwise function.
Function = Callable[[Array], Array]
# A function in place of a matrix W: from x and a bias b to x W + b.
Tap = Callable[[Array, Array | None], Array]
# [*B, D], or [*B, G, H] if the projection of x has been taken out of the step.
Input = Float[Array, "..."]
# 1 / (1 - rate)
Scale = Float[Array, ""]


class LSTMCarry(NamedTuple):
    """The carry of all LSTMs, the tuple (c, h)."""

    c: Float[Array, "*B H"]  # At least float32: it accumulates over the whole sequence.
    h: Float[Array, "*B H"]  # In the compute dtype.


# Lets exported programs that take or return it be serialised.
with contextlib.suppress(ValueError):  # A module that is imported again has registered it before.
    export.register_namedtuple_serialization(LSTMCarry, serialized_name="mogrifier_jax.LSTMCarry")


class Carry(NamedTuple):
    """The state of the GRU and the Elman network; `layers.py` shows users h alone."""

    h: Float[Array, "*B H"]  # In the compute dtype.


State = LSTMCarry | Carry


def cast_state(state: State, dtype: DTypeLike) -> State:
    """The state in the dtype of a computation; c is at least float32."""
    return type(state)(
        *(
            part.astype(wide(dtype) if name == "c" else dtype)
            for name, part in state._asdict().items()
        )
    )


def project(
    x: Float[Array, "*B I"],
    kernel: Float[Array, "I *O"] | Tap,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """x times kernel, plus bias, [*B, *O]; the result is at least float32."""
    if callable(kernel):  # A tap of `recurrence.py`.
        return kernel(x, bias)
    y = widen(jnp.tensordot(x, kernel, axes=1))
    return y if bias is None else y + stretch(bias, y)


def affine(params: Params, x: Float[Array, "*B I"]) -> Float[Array, "..."]:
    """x W + b, where W may be a product of two thin factors and b may be absent."""
    bias = params.get("bias")
    if "kernel" in params:
        return project(x, params["kernel"], bias)
    if callable(params["down"]):  # A tap for both factors.
        return params["down"](x, bias)
    low = project(x, params["down"]).astype(x.dtype)
    return project(low, params["up"], bias)


def widen(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Casts x to at least float32, the type of all elementwise operations."""
    return x.astype(wide(x.dtype))


def wide(dtype: DTypeLike) -> np.dtype:
    """The wider one of this dtype and float32."""
    return np.promote_types(dtype, np.float32)  # jnp.promote_types fails under strict promotion.


def stretch(vector: Float[Array, "..."], like: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Broadcasts a parameter to the shape and dtype of the array that it is combined with."""
    return jnp.broadcast_to(vector.astype(like.dtype), like.shape)


def layer_norm(
    x: Float[Array, "*S"], gain: Float[Array, "..."], axes: int | tuple[int, ...] = -1
) -> Float[Array, "*S"]:
    """Normalises jointly over `axes`, with a trained gain and no shift."""
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-9) * stretch(gain, x)


def mogrify(
    rounds: Sequence[Params], x: Float[Array, "*B D"], h: Float[Array, "*B H"], zigzag: bool = True
) -> tuple[Float[Array, "*B D"], Float[Array, "*B H"], list[Float[Array, "*B _"]]]:
    """Lets x and h gate each other in turn, x first (arXiv:1909.01792, eqs. 1-2).

    Without `zigzag` every gate reads the original x and h. Returns x, h and the gates 2σ(.).
    """
    sources = [h, x]  # What odd and even rounds read.
    gated = [x, h]  # What they scale.
    gates = []
    for i, params in enumerate(rounds):
        gate = 2 * jax.nn.sigmoid(affine(params, sources[i % 2]))
        gates.append(gate)
        gated[i % 2] = (gate * widen(gated[i % 2])).astype(gated[i % 2].dtype)
        if zigzag:
            sources[1 - i % 2] = gated[i % 2]
    return gated[0], gated[1], gates


def lstm(
    params: Params,
    carry: LSTMCarry,
    x: Input,
    keep: Bool[Array, "*B H"] | None = None,
    scale: Scale | None = None,
    zone_c: Bool[Array, "*B H"] | None = None,
    zone_h: Bool[Array, "*B H"] | None = None,
    *,
    zigzag: bool = True,
    cap_input_gate: bool = True,
    tied_gates: bool = False,
    cell_clip: float | None = None,
    zoneout: float = 0.0,
    gate_fn: Function = jax.nn.sigmoid,
    activation_fn: Function = jnp.tanh,
) -> tuple[LSTMCarry, Gates]:
    """LSTM, Mogrifier LSTM or multiplicative LSTM; the groups in `params` decide which.

    `zone_c` and `zone_h` mark the elements of the state that zoneout leaves as they were.
    """
    x, h, rounds = modulate(params, x, carry.h, keep, scale, zigzag)
    if "multiplicative" in params:
        x, h = multiply(params, x, h)
    z = gate_inputs(params["gates"], x, h)

    j = activation_fn(z[..., 0, :])
    o = gate_fn(z[..., 1, :])
    f = gate_fn(z[..., 2, :])
    if tied_gates:
        i = 1 - f
    else:
        i = gate_fn(z[..., 3, :])
        if cap_input_gate:
            i = jnp.minimum(i, 1 - f)  # Keeps |c| <= 1.
    c = f * widen(carry.c) + i * j
    read = c
    if "cell_norm" in params:  # The output reads a normalised c; the stored c is not normalised.
        norm = params["cell_norm"]
        read = layer_norm(c, norm["gain"]) + stretch(norm["shift"], c)
    h = o * activation_fn(read)
    if cell_clip is not None:  # It affects only the next step: h is already computed.
        c = jnp.clip(c, -cell_clip, cell_clip)
    if zoneout:
        c = zone(zoneout, zone_c, widen(carry.c), c)
        h = zone(zoneout, zone_h, widen(carry.h), h)
    gates = {"j": j, "o": o, "f": f, "i": i, "c": c, "rounds": rounds}
    return LSTMCarry(c, h.astype(carry.h.dtype)), gates


def zone(
    rate: float,
    mask: Bool[Array, "*B H"] | None,
    old: Float[Array, "*B H"],
    new: Float[Array, "*B H"],
) -> Float[Array, "*B H"]:
    """Zoneout (arXiv:1606.01305): the old value where the mask is set; without a mask, the mean."""
    return rate * old + (1 - rate) * new if mask is None else jnp.where(mask, old, new)


def rewired_lstm(
    params: Params,
    carry: LSTMCarry,
    x: Input,
    keep: Bool[Array, "*B H"] | None = None,
    scale: Scale | None = None,
    *,
    zigzag: bool = True,
    gate_fn: Function = jax.nn.sigmoid,
    activation_fn: Function = jnp.tanh,
) -> tuple[LSTMCarry, Gates]:
    """Rewired LSTM (arXiv:2211.01848) of the modulated x and h.

    Its forget gate reads the proposed update i ⊙ j and h, and its output gate reads the new c. The
    state dropout applies to that c too.
    """
    x, h, rounds = modulate(params, x, carry.h, keep, scale, zigzag)
    z = gate_inputs(params["gates"], x, h)
    i = gate_fn(z[..., 0, :])
    j = activation_fn(z[..., 1, :])
    update = (i * j).astype(h.dtype)
    f = gate_fn(affine(params["forget"], jnp.concatenate([update, h], -1)))
    i = jnp.minimum(i, 1 - f)  # Keeps |c| <= 1.
    c = f * widen(carry.c) + i * j
    o = gate_fn(affine(params["output"], drop(c.astype(h.dtype), keep, scale)))
    h = o * activation_fn(c)
    gates = {"j": j, "o": o, "f": f, "i": i, "c": c, "rounds": rounds}
    return LSTMCarry(c, h.astype(carry.h.dtype)), gates


def gru(
    params: Params,
    carry: Carry,
    x: Input,
    keep: Bool[Array, "*B H"] | None = None,
    scale: Scale | None = None,
    *,
    zigzag: bool = True,
    gate_fn: Function = jax.nn.sigmoid,
    activation_fn: Function = jnp.tanh,
) -> tuple[Carry, Gates]:
    """GRU of the modulated x and h; the reset gate comes after the matmul, as in `nn.GRUCell`."""
    x, h, rounds = modulate(params, x, carry.h, keep, scale, zigzag)
    zx, zh = gate_projections(params["gates"], x, h)
    r, u, n = (zx[..., g, :] for g in range(3))
    rh, uh, nh = (zh[..., g, :] for g in range(3))
    r = gate_fn(r + rh)
    u = gate_fn(u + uh)
    n = activation_fn(n + r * (nh + stretch(params["gates"]["candidate_bias"], nh)))
    # The rounds also modulate the h that is carried over, but dropout affects only the gates.
    kept = widen(carry.h)
    for gate in rounds[1::2]:
        kept = gate * kept
    h = (1 - u) * n + u * kept
    return Carry(h.astype(carry.h.dtype)), {"r": r, "u": u, "n": n, "rounds": rounds}


def elman(
    params: Params,
    carry: Carry,
    x: Input,
    keep: Bool[Array, "*B H"] | None = None,
    scale: Scale | None = None,
    *,
    zigzag: bool = True,
    activation_fn: Function = jnp.tanh,
) -> tuple[Carry, Gates]:
    """Elman network: h = tanh(W x + U h + b) of the modulated x and h."""
    x, h, rounds = modulate(params, x, carry.h, keep, scale, zigzag)
    h = activation_fn(gate_inputs(params["gates"], x, h)[..., 0, :])
    return Carry(h.astype(carry.h.dtype)), {"h": h, "rounds": rounds}


def modulate(
    params: Params,
    x: Input,
    h: Float[Array, "*B H"],
    keep: Bool[Array, "*B H"] | None,
    scale: Scale | None,
    zigzag: bool,
) -> tuple[Input, Float[Array, "*B H"], list[Float[Array, "*B _"]]]:
    """The x and h that the gates read: after state dropout, constant scaling and the Mogrifier."""
    h = drop(h, keep, scale)
    if "scaling" in params:
        x = x * stretch(params["scaling"]["x"], x)
        h = h * stretch(params["scaling"]["h"], h)
    if "rounds" not in params:
        return x, h, []
    return mogrify(params["rounds"], x, h, zigzag)


def drop(
    state: Float[Array, "*B H"], keep: Bool[Array, "*B H"] | None, scale: Scale | None
) -> Float[Array, "*B H"]:
    """The state as the gates read it, which is after dropout if there is a mask."""
    if keep is None or scale is None:
        return state
    return jnp.where(keep, state * scale.astype(state.dtype), jnp.zeros_like(state))


def multiply(
    params: Params, x: Input, h: Float[Array, "*B H"]
) -> tuple[Input, Float[Array, "*B H"]]:
    """The mLSTM's h_m = (W_mx x) ⊙ (W_mh h) (arXiv:1609.07959)."""
    maps = params["multiplicative"]
    if "input" in maps:
        mx = project(x, maps["input"])
    else:  # `split_input_projection` has put W_mx x before the gates.
        mx, x = widen(x[..., 0, :]), x[..., 1:, :]
    return x, (mx * project(h, maps["recurrent"])).astype(h.dtype)


def gate_inputs(params: Params, x: Input, h: Float[Array, "*B H"]) -> Float[Array, "*B G H"]:
    """Pre-activations of all gates: G is 4 for the LSTM, in lamb's order j o f i."""
    if "recurrent" not in params:
        return affine(params, jnp.concatenate([x, h], -1))
    if "input" not in params and "shift" not in params:  # x is projected already.
        return project(h, params["recurrent"], x)
    zx, zh = gate_projections(params, x, h)
    if "shift" in params:
        zx = layer_norm(zx, params["input_gain"], (-2, -1))
        zh = layer_norm(zh, params["recurrent_gain"], (-2, -1))
        return zx + zh + stretch(params["shift"], zx)
    return zx + zh


def gate_projections(
    params: Params, x: Input, h: Float[Array, "*B H"]
) -> tuple[Float[Array, "*B G H"], Float[Array, "*B G H"]]:
    """The contributions of x and h to the pre-activations; x may be projected already."""
    zx = project(x, params["input"], params.get("bias")) if "input" in params else widen(x)
    return zx, project(h, params["recurrent"])


def split_input_projection(params: Params) -> tuple[Params, Params | None]:
    """Takes the projection of x out of the step: returns equivalent parameters, and a map or None.

    If nothing modulates x before the gates, its projection does not depend on the state, so it is
    returned as a separate map, which `recurrence.scan` applies before the step. Otherwise the two
    gate matrices are joined, because one large matmul is faster than two and because one sum less
    is stored for the backward pass.
    """
    gates = params["gates"]
    if "input" not in gates:
        return params, None
    if "rounds" not in params and "scaling" not in params:
        inputs = {name: gates[name] for name in gates if name in ("input", "bias")}
        params = {**params, "gates": {name: gates[name] for name in gates if name not in inputs}}
        if "multiplicative" in params:
            maps = params["multiplicative"]
            params["multiplicative"] = {"recurrent": maps["recurrent"]}
            inputs["input"] = jnp.concatenate([maps["input"][:, None], inputs["input"]], 1)
            if "bias" in inputs:
                inputs["bias"] = jnp.pad(inputs["bias"], [(1, 0), (0, 0)])
        return params, inputs
    if "multiplicative" in params or "shift" in gates or "candidate_bias" in gates:
        return params, None  # These need the projections of x and h separately.
    kernel = jnp.concatenate([gates["input"], gates["recurrent"]], 0)
    return {**params, "gates": {"kernel": kernel, "bias": gates["bias"]}}, None
