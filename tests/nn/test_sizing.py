"""Counts against the published sizes, and against shapes counted one by one."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from mogrifier_jax import errors
from mogrifier_jax.nn import layers, models

TUNED = json.loads((pathlib.Path(__file__).parents[1] / "tuned_values.json").read_text())[
    "experiments"
]
OF_MODEL = {field.name for field in dataclasses.fields(models.LanguageModel)}


def make(vocab_size, hidden_size, embedding_size, **options):
    """A model; options that are not the model's own are the cell's."""
    own = {name: value for name, value in options.items() if name in OF_MODEL}
    of_cell = {name: value for name, value in options.items() if name not in OF_MODEL}
    return models.LanguageModel(
        vocab_size, hidden_size, embedding_size, cell_options=of_cell, **own
    )


def count(model):
    return sum(models.count_parameters(model).values())


def solve(budget, vocab_size, ratio, **options):
    return models.solve_hidden_size(
        budget, lambda h: make(vocab_size, h, models.embedding_size(h, ratio), **options)
    )


def model_sizes(values):
    """The options of a model among a row's values."""
    names = ("num_layers", "rounds", "rank", "tied_embeddings", "mixture_components")
    return {name: values[f"model.{name}"] for name in names}


@pytest.mark.parametrize("name", TUNED)
def test_published_hidden_sizes(name):
    row = TUNED[name]
    values, kwargs = row["values"], model_sizes(row["values"])
    budget, ratio = values["model.num_params"], values["model.embedding_ratio"]
    for vocab_size, hidden_size, embedding_size in row["sizes"]:
        solved = solve(budget, vocab_size, ratio, **kwargs)
        assert (solved, models.embedding_size(solved, ratio)) == (hidden_size, embedding_size)
    if row["parameters"]:
        counts = [
            count(make(vocab_size, h, models.embedding_size(h, ratio), **kwargs))
            for h in (hidden_size, hidden_size + 1)
        ]
        assert counts == row["parameters"]
        assert counts[0] <= budget < counts[1]


@pytest.mark.parametrize("name", [name for name in TUNED if len(TUNED[name]["sizes"]) > 1])
def test_rows_by_vocabulary_begin_where_the_table_says(name):
    """One token fewer than a row's first vocabulary still gives the row before."""
    row = TUNED[name]
    kwargs = model_sizes(row["values"])
    ratio = row["values"]["model.embedding_ratio"]
    for (_, before, _), (vocab_size, after, _) in zip(row["sizes"], row["sizes"][1:], strict=False):
        solved = [solve(24_000_000, v, ratio, **kwargs) for v in (vocab_size - 1, vocab_size)]
        assert solved == [before, after]


@pytest.mark.parametrize("embedding_size, hidden_size", [(498, 787), (493, 790)])
def test_copy_task_sizes_are_maximal(embedding_size, hidden_size):
    def make_copier(h):
        sizes = (1003, h, embedding_size)
        return models.EncoderDecoder(*sizes, num_layers=1, cell_options={"rounds": 0})

    model = make_copier(hidden_size)
    assert count(model) <= 10_000_000 < count(make_copier(hidden_size + 1))
    params = jax.eval_shape(model.init, jax.random.key(0), **model.example())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count(model)


# [D, H, options, tensors]: every tensor of one layer written out.
D, H = 3, 5
ROUNDS_OF_3 = [(H, D), (D,), (D, H), (H,), (H, D), (D,)]
RANK_2_ROUNDS_OF_3 = [(H, 2), (2, D), (D,), (D, 2), (2, H), (H,), (H, 2), (2, D), (D,)]
LSTM = [(D + H, 4 * H), (4 * H,)]
# i and j of [x, h], f of [i * j, h], o of c.
REWIRED = [(D + H, 2 * H), (2 * H,), (2 * H, H), (H,), (H, H), (H,)]
LAYERS = [
    ("lstm", {}, LSTM),
    ("lstm", {"rounds": 3}, [*ROUNDS_OF_3, *LSTM]),
    ("lstm", {"tied_gates": True}, [(D + H, 3 * H), (3 * H,)]),
    ("lstm", {"gate_rank": 2}, [(D + H, 2), (2, 4 * H), (4 * H,)]),
    ("lstm", {"layer_norm": True}, [*LSTM, (4 * H,), (4 * H,), (H,), (H,)]),
    ("lstm", {"scaling": True}, [*LSTM, (D,), (H,)]),
    ("mogrifier_lstm", {"rounds": 0}, LSTM),
    ("mogrifier_lstm", {"rounds": 3}, [*ROUNDS_OF_3, *LSTM]),
    ("mogrifier_lstm", {"rounds": 3, "rank": -20}, [*ROUNDS_OF_3, *LSTM]),
    ("mogrifier_lstm", {"rounds": 3, "rank": 2}, [*RANK_2_ROUNDS_OF_3, *LSTM]),
    (
        "mogrifier_lstm",
        {"rounds": 3, "gate_bias": False},
        [shape for shape in ROUNDS_OF_3 if len(shape) == 2] + LSTM,
    ),
    ("mogrifier_no_zigzag", {"rounds": 3, "rank": 2}, [*RANK_2_ROUNDS_OF_3, *LSTM]),
    ("mlstm", {}, [(D, H), (H, H), *LSTM]),
    ("rewired_lstm", {}, REWIRED),
    ("rewired_lstm", {"rounds": 3, "rank": 2}, [*RANK_2_ROUNDS_OF_3, *REWIRED]),
    ("mogrifier_gru", {"rounds": 3}, [*ROUNDS_OF_3, (D + H, 3 * H), (3 * H,), (H,)]),
    ("mogrifier_elman", {"rounds": 3}, [*ROUNDS_OF_3, (D + H, H), (H,)]),
]


def size(shapes):
    return sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes)


@pytest.mark.parametrize("cell, options, shapes", LAYERS)
def test_layers_have_the_tensors_written_out(cell, options, shapes):
    options = {"rounds": 0, **options}
    parts = models.count_parameters(make(7, H, D, num_layers=1, cell=cell, **options))
    assert parts["recurrent"] == size(shapes)
    assert parts["embedding"] == 7 * D
    assert parts["projection"] == H * D
    assert parts["softmax"] == D * 7 + 7


@pytest.mark.parametrize("cell, options, shapes", LAYERS)
def test_layers_have_the_parameters_of_the_modules(cell, options, shapes):
    module = layers.CELLS[cell](**{"features": H, "rounds": 0, **options})
    carry = module.initialize_carry(jax.random.key(0), (1, D))
    params = jax.eval_shape(module.init, jax.random.key(0), carry, jnp.ones((1, D)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size(shapes)


@pytest.mark.parametrize(
    "options, total",
    [  # Small models whose scalars were counted in the authors' program.
        (dict(embedding_size=5, tied_embeddings=True, rounds=5, rank=3), 832),
        (dict(embedding_size=3, tied_embeddings=True, mixture_components=2, rounds=2, rank=2), 564),
        (dict(embedding_size=3, rounds=3), 610),
        (dict(embedding_size=5, rounds=0), 517),
    ],
)
def test_small_models_count_as_the_authors(options, total):
    assert count(make(7, 5, **options)) == total


@pytest.mark.parametrize(
    "hidden_size, ratio, expected",
    [(10, 1.0, 10), (10, 1.9, 10), (10, 0.24, 2), (10, 0.0, 1), (5, 0.5, 2), (7, 0.5, 4)],
)
def test_embedding_size_rounds_halves_to_even(hidden_size, ratio, expected):
    assert models.embedding_size(hidden_size, ratio) == expected


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("budget", [150, 999, 20_000])
def test_bisection_equals_linear_search(ratio, budget):
    kwargs = dict(rounds=4, rank=2)
    counts = {h: count(make(11, h, models.embedding_size(h, ratio), **kwargs)) for h in range(200)}
    linear = max(h for h in range(1, 200) if counts[h] <= budget)
    assert solve(budget, 11, ratio, **kwargs) == linear < 199


def test_impossible_requests_name_value_and_remedy():
    with pytest.raises(errors.UsageError, match=r"num_params 20,000 .* 30,0\d\d .*raise"):
        solve(20_000, 10_001, 1.0, rounds=0)
    with pytest.raises(errors.UsageError, match=r"'gru' is not known.*mogrifier_gru"):
        solve(10**6, 10_001, 1.0, cell="gru")
    with pytest.raises(errors.UsageError, match=r"rounds -1"):
        solve(10**6, 10_001, 1.0, rounds=-1)
