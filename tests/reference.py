"""Float64 NumPy loops: every cell, the stack, the softmax and the encoder-decoder.

Written from the equations, with one matrix W [D + H, gates * H] for a cell as in lamb (rows x
then h, columns j o f i), one time step after another and nothing shared with the package but
the names in a tree of parameters. Axes: T time, B batch, D input, H hidden, V vocabulary.
Dropout comes in as multipliers (0 or 1 / keep), so that a test decides what is dropped.
"""

import copy

import numpy as np

# Every cell and switch: (name of the cell, its options).
VARIANTS = {
    "lstm": ("lstm", {}),
    "lstm uncapped": ("lstm", {"cap_input_gate": False}),
    "lstm tied": ("lstm", {"tied_gates": True}),
    "lstm clipped": ("lstm", {"cell_clip": 0.1}),
    "lstm zoned": ("lstm", {"zoneout": 0.3}),
    "lstm normed": ("lstm", {"layer_norm": True}),
    "lstm scaled": ("lstm", {"scaling": True}),
    "lstm factored": ("lstm", {"gate_rank": 3}),
    "mogrifier": ("mogrifier_lstm", {"rounds": 5}),
    "mogrifier low rank": ("mogrifier_lstm", {"rounds": 5, "rank": 2}),
    "mogrifier no bias": ("mogrifier_lstm", {"rounds": 3, "rank": 2, "gate_bias": False}),
    "mogrifier no zigzag": ("mogrifier_no_zigzag", {"rounds": 4}),
    "mogrifier all": (
        "mogrifier_lstm",
        {"rounds": 2, "rank": 2, "layer_norm": True, "scaling": True, "cell_clip": 0.4},
    ),
    "mogrifier factored": ("mogrifier_lstm", {"rounds": 2, "gate_rank": 3, "tied_gates": True}),
    "mlstm": ("mlstm", {}),
    "mlstm normed": ("mlstm", {"layer_norm": True, "rounds": 2}),
    "rewired": ("rewired_lstm", {"rounds": 0}),
    "rewired scaled": ("rewired_lstm", {"rounds": 0, "scaling": True}),
    "mogrifier rewired": ("rewired_lstm", {"rounds": 5}),
    "mogrifier rewired low rank": ("rewired_lstm", {"rounds": 4, "rank": 2}),
    "gru": ("mogrifier_gru", {"rounds": 0}),
    "mogrifier gru": ("mogrifier_gru", {"rounds": 4, "rank": 2}),
    "elman": ("mogrifier_elman", {"rounds": 0}),
    "mogrifier elman": ("mogrifier_elman", {"rounds": 3, "rank": 2}),
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, gain):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-9) * gain


def mogrify(params, rounds, x, h, zigzag=True):
    """x and h after `rounds` rounds, and the gates of each."""
    x0, h0, gates = x, h, []
    for q in range(rounds):
        p = params[f"round_{q + 1}"]
        matrix = p["kernel"] if "kernel" in p else p["down"] @ p["up"]
        source = (h if zigzag else h0) if q % 2 == 0 else (x if zigzag else x0)
        gate = 2 * sigmoid(source @ matrix + p.get("bias", 0.0))
        gates.append(gate)
        if q % 2 == 0:
            x = x * gate
        else:
            h = h * gate
    return x, h, gates


def step(cell, options, params, state, x, mask=None):
    """One step: returns the new state, (c, h) or (h,), and a dict of what happened inside."""
    h = read = state[-1]
    units = h.shape[-1]
    if mask is not None:
        read = read * mask
    if options.get("scaling"):
        x, read = x * params["scaling"]["x"], read * params["scaling"]["h"]
    zigzag = cell != "mogrifier_no_zigzag"
    x, read, rounds = mogrify(params, options.get("rounds", 0), x, read, zigzag)
    p = params["gates"]
    if cell == "rewired_lstm":
        return rewired_step(params, state, x, read, 1.0 if mask is None else mask, rounds)
    if cell == "mogrifier_elman":
        h = np.tanh(x @ flat(p["input"]) + read @ flat(p["recurrent"]) + flat(p["bias"], 0))
        return (h,), {"h": h, "rounds": rounds}
    if cell == "mogrifier_gru":
        of_x = x @ flat(p["input"]) + flat(p["bias"], 0)
        of_h = read @ flat(p["recurrent"])
        r = sigmoid(of_x[:, :units] + of_h[:, :units])
        u = sigmoid(of_x[:, units : 2 * units] + of_h[:, units : 2 * units])
        n = np.tanh(of_x[:, 2 * units :] + r * (of_h[:, 2 * units :] + p["candidate_bias"]))
        kept = h  # Gated, but not dropped.
        for gate in rounds[1::2]:
            kept = kept * gate
        return ((1 - u) * n + u * kept,), {"r": r, "u": u, "n": n, "rounds": rounds}
    if cell == "mlstm":
        m = params["multiplicative"]
        read = (x @ m["input"]) * (read @ m["recurrent"])
    z = lstm_inputs(options, p, x, read)
    j = np.tanh(z[:, :units])
    o = sigmoid(z[:, units : 2 * units])
    f = sigmoid(z[:, 2 * units : 3 * units])
    if options.get("tied_gates"):
        i = 1 - f
    else:
        i = sigmoid(z[:, 3 * units :])
        if options.get("cap_input_gate", True):
            i = np.minimum(i, 1 - f)
    c = f * state[0] + i * j
    seen = c
    if options.get("layer_norm"):
        seen = norm(c, params["cell_norm"]["gain"]) + params["cell_norm"]["shift"]
    h = o * np.tanh(seen)
    if options.get("cell_clip"):
        c = np.clip(c, -options["cell_clip"], options["cell_clip"])
    if zoneout := options.get("zoneout"):  # Outside training: the mean over the masks.
        c, h = (zoneout * old + (1 - zoneout) * new for old, new in zip(state, (c, h), strict=True))
    return (c, h), {"j": j, "o": o, "f": f, "i": i, "c": c, "rounds": rounds}


def rewired_step(params, state, x, h, mask, rounds):
    """The equations of arXiv:2211.01848 with one matrix for each pair of an output and an input."""
    p, units = params["gates"], h.shape[-1]
    of_x, of_h = flat(p["input"]), flat(p["recurrent"])
    w_ix, w_jx, w_ih, w_jh = (w[:, k : k + units] for w in (of_x, of_h) for k in (0, units))
    b_i, b_j = p["bias"]
    w_fu, w_fh = params["forget"]["kernel"][:units], params["forget"]["kernel"][units:]
    i = sigmoid(x @ w_ix + h @ w_ih + b_i)
    j = np.tanh(x @ w_jx + h @ w_jh + b_j)
    f = sigmoid((i * j) @ w_fu + h @ w_fh + params["forget"]["bias"])
    i = np.minimum(i, 1 - f)
    c = f * state[0] + i * j
    o = sigmoid((c * mask) @ params["output"]["kernel"] + params["output"]["bias"])
    h = o * np.tanh(c)
    return (c, h), {"j": j, "o": o, "f": f, "i": i, "c": c, "rounds": rounds}


def lstm_inputs(options, p, x, h):
    if options.get("layer_norm"):
        of_x = norm(x @ flat(p["input"]), flat(p["input_gain"], 0))
        of_h = norm(h @ flat(p["recurrent"]), flat(p["recurrent_gain"], 0))
        return of_x + of_h + flat(p["shift"], 0)
    if options.get("gate_rank"):
        w = p["down"] @ flat(p["up"])
    else:
        w = np.concatenate([flat(p["input"]), flat(p["recurrent"])])
    return np.concatenate([x, h], -1) @ w + flat(p["bias"], 0)


def flat(array, keep=1):
    """Joins the axes after the first `keep`: blocks of columns, one for each gate."""
    return array.reshape(*array.shape[:keep], -1)


def run(cell, options, params, state, xs, masks=None, lengths=None):
    """A layer over xs [T, B, D]: (state, ys [T, B, H], gates at each step)."""
    ys, seen = [], []
    for t, x in enumerate(xs):
        after, gates = step(cell, options, params, state, x, None if masks is None else masks[t])
        valid = np.ones((len(x), 1), bool)
        if lengths is not None:
            valid = t < np.asarray(lengths)[:, None]
        state = tuple(np.where(valid, new, old) for new, old in zip(after, state, strict=True))
        ys.append(np.where(valid, after[-1], 0.0))
        seen.append(gates)
    return state, np.stack(ys), seen


def stack(model, params, state, xs, lengths=None, masks=None):
    """All layers: (state of each, output [T, B, H], gates of each)."""
    masks = masks or {}
    after, outputs, gates = [], [], []
    for index in range(model.num_layers):
        if index and "inter_layer" in masks:
            xs = xs * masks["inter_layer"][index - 1]
        state_masks = masks["state"][index] if "state" in masks else None
        options = dict(model.cell_options)
        cell_params = params[f"layers_{index}"]["cell"]
        last, ys, seen = run(
            model.cell, options, cell_params, state[index], xs, state_masks, lengths
        )
        after.append(last)
        gates.append(seen)
        if "cell_output" in masks:
            ys = ys * masks["cell_output"][index]
        outputs.append(outputs[-1] + ys if model.output == "residual" and index else ys)
        xs = outputs[-1]
    return after, sum(outputs) if model.output == "sum" else outputs[-1], gates


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def log_probabilities(model, params, ys, temperature=1.0, masks=None):
    """[T, B, V] from the stack's output."""
    masks, p = masks or {}, params["softmax"]
    if "output" in masks:
        ys = ys * masks["output"][0]
    matrix = params["embedding"].T if model.tied_embeddings else p["kernel"]
    if model.mixture_components:
        us = np.tanh(np.einsum("tbh,hce->tbce", ys, p["projection"]) + p["projection_bias"])
        if "downprojected" in masks:
            us = us * masks["downprojected"][0]
        parts = log_softmax(temperature * (us @ matrix + p["bias"]))
        weights = log_softmax(ys @ p["mixture"])
        return np.log(np.exp(parts + weights[..., None]).sum(-2))
    if model.embedding_size != model.hidden_size:
        ys = ys @ p["projection"]
        if "downprojected" in masks:
            ys = ys * masks["downprojected"][0]
    return log_softmax(temperature * (ys @ matrix + p["bias"]))


def zero_state(model, batch_size):
    leaves = 1 if model.cell in ("mogrifier_gru", "mogrifier_elman") else 2
    return [(np.zeros((batch_size, model.hidden_size)),) * leaves] * model.num_layers


def language_model(
    model, params, inputs, targets, state=None, lengths=None, temperature=1.0, masks=None
):
    """(nats [B, T], state of each layer, gates of each layer)."""
    state = zero_state(model, len(inputs)) if state is None else state
    xs = params["embedding"][inputs.T]
    if masks and "input" in masks:
        xs = xs * masks["input"][0]
    state, ys, gates = stack(model, params["stack"], state, xs, lengths, masks)
    log_p = log_probabilities(model, params, ys, temperature, masks)
    nats = -np.take_along_axis(log_p, targets.T[..., None], -1)[..., 0]
    if lengths is not None:
        nats = np.where(np.arange(len(nats))[:, None] < np.asarray(lengths), nats, 0.0)
    return nats.T, state, gates


def encoder_decoder(model, params, source, source_lengths, inputs, targets, lengths):
    """Nats [B, T]; the decoder, a language model, starts from the encoder's last real state."""
    xs = params["source_embedding"][source.T]
    start = zero_state(model, len(source))
    state, _, _ = stack(model, params["encoder"], start, xs, source_lengths)
    return language_model(_Untied(model), params["decoder"], inputs, targets, state, lengths)[0]


class _Untied:
    """A view of an encoder-decoder as a language model with an ordinary untied softmax."""

    tied_embeddings, mixture_components = False, 0

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)


def to_numpy(tree):
    """Nested dicts, lists and tuples of float64 arrays, free to change."""
    if isinstance(tree, dict):
        return {name: to_numpy(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_numpy(value) for value in tree]
    return np.array(tree, np.float64)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves(tree[name])]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def gradients(fn, tree, epsilon=1e-5):
    """Central differences of fn(tree) in every scalar: a list of arrays like leaves(tree)."""
    tree = copy.deepcopy(tree)
    found = []
    for leaf in leaves(tree):
        slopes = np.zeros_like(leaf)
        for index in np.ndindex(*leaf.shape):
            here = leaf[index]
            leaf[index] = here + epsilon
            above = fn(tree)
            leaf[index] = here - epsilon
            below = fn(tree)
            leaf[index] = here
            slopes[index] = (above - below) / (2 * epsilon)
        found.append(slopes)
    return found


def slope(fn, tree, direction, epsilon=1e-5):
    """Central difference of fn(tree) along a tree of directions."""

    def moved(by):
        tree_by = copy.deepcopy(tree)
        for leaf, way in zip(leaves(tree_by), leaves(direction), strict=True):
            leaf += by * way
        return fn(tree_by)

    return (moved(epsilon) - moved(-epsilon)) / (2 * epsilon)
