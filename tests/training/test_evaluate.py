"""Deterministic evaluation: every token once, the state kept, the temperature of lamb's grid."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import configs
from mogrifier_jax.data import corpora, tasks, vocabularies
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate

TEXT = "".join("abcdefg"[(i * i + i // 5) % 7] + "\n" * (i % 4 == 0) for i in range(150))


class Small:
    """A model with a task on a text of a few lines."""

    def __init__(self, patch):
        vocab = vocabularies.Vocabulary.from_text(TEXT, "character")
        split = vocab.encode_split(TEXT)
        self.tokens, self.eos = split.tokens, vocab.eos_id
        corpus = corpora.Corpus("text", "character", vocab, split, split, split)
        patch.setattr(corpora, "load_corpus", lambda name, **options: corpus)
        key = jax.random.key(0)
        self.task = tasks.make_task(key, None, name="text", batch_size=4, window=6)
        self.model = models.make_model(len(vocab), hidden_size=6, num_layers=1, rounds=0)
        params = jax.jit(self.model.init)(key, **self.model.example())["params"]
        # Sharpened, so that temperatures matter.
        self.params = jax.tree.map(lambda p: 3 * p, params)
        self.nats = jax.jit(
            lambda *args: self.model.apply({"params": self.params}, *args, method="nats")
        )

    def direct(self):
        """The nats of the whole text as one window."""
        inputs = np.concatenate([[self.eos], self.tokens[:-1]])
        tokens = (jnp.asarray(a[None], jnp.int32) for a in (inputs, self.tokens))
        return np.asarray(self.nats(*tokens)[1][0], np.float64)


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        yield Small(patch)


@pytest.fixture(scope="module")
def one_stream(small):
    return evaluate.Deterministic(small.model, small.task.plan("valid", 1), chunk=5)


def test_windows_of_one_stream_score_as_the_whole_text(small, one_stream):
    assert one_stream.plan.num_windows > 2 * 5  # Several dispatches, the last one not full.
    assert one_stream.plan.num_windows % 5
    score = one_stream.sums(small.params, [1.0])
    assert score.count == len(small.tokens)
    np.testing.assert_allclose(score.total, small.direct().sum(), rtol=1e-6)
    # A state that started anew with each stripe gives another sum.
    stripes = evaluate.Deterministic(small.model, small.task.plan("valid", 8)).sums(
        small.params, [1.0]
    )
    assert stripes.count == score.count
    assert abs(stripes.total / score.total - 1) > 1e-4


def test_several_temperatures_in_one_pass_equal_a_pass_for_each(small, one_stream):
    temperatures = (1.06, 0.9, 0.5)
    search = evaluate.Deterministic(small.model, one_stream.plan, chunk=5)
    together = search.sums(small.params, temperatures, max_windows=7)
    alone = [one_stream.sums(small.params, [t], max_windows=7) for t in temperatures]
    assert {together.count, *(each.count for each in alone)} == {6 * 7}
    totals = np.concatenate([each.total for each in alone])
    np.testing.assert_allclose(together.total, totals, rtol=1e-6)
    assert min(abs(np.diff(totals))) > 1e-4 * totals[0]


def test_the_first_windows_are_scored_alone(small, one_stream):
    direct = small.direct()
    for windows in (1, 5, 7):
        score = one_stream.sums(small.params, [1.0], max_windows=windows)
        assert score.count == 6 * windows
        np.testing.assert_allclose(score.total, direct[: 6 * windows].sum(), rtol=1e-6)


def test_one_program_serves_all_dispatches_and_temperatures(small, one_stream):
    warm, cold = (one_stream.sums(small.params, [scale]).total for scale in (0.9, 1.1))
    assert warm != cold
    tokens = one_stream(small.params, 0.9)
    np.testing.assert_array_equal(tokens.tokens, small.tokens)
    np.testing.assert_allclose(tokens.nats.sum(dtype=np.float64), warm[0], rtol=1e-6)
    assert one_stream._sum._cache_size() == one_stream._score._cache_size() == 1


def test_the_search_goes_down_the_grid_and_stops_after_two_failures():
    def search(best, at_once=1):
        tried = []

        def xes(group):
            tried.extend(group)
            return [(temperature - best) ** 2 for temperature in group]

        return evaluate.search_temperature(xes, at_once), tried

    assert evaluate.TEMPERATURES[:3] == (1.06, 1.04, 1.02)
    assert (len(evaluate.TEMPERATURES), evaluate.TEMPERATURES[-1]) == (14, 0.8)
    assert search(1.0) == (1.0, [1.06, 1.04, 1.02, 1.0, 0.98, 0.96])
    assert search(2.0) == (1.06, [1.06, 1.04, 1.02])
    assert search(0.0) == (0.8, list(evaluate.TEMPERATURES))
    for best in (2.0, 1.0, 0.91, 0.0):  # In groups it finds the same, with fewer calls.
        found, tried = search(best, at_once=7)
        assert found == search(best)[0] and len(tried) in (7, 14)


def test_a_failure_between_successes_does_not_stop_the_search():
    xes = dict(zip(evaluate.TEMPERATURES, [5, 6, 4, 6, 3, 9, 9, 0], strict=False))
    for at_once in (1, 2):
        found = evaluate.search_temperature(lambda group: [xes[t] for t in group], at_once)
        assert found == 0.98


def test_a_search_that_finds_only_nan_returns_one():
    assert evaluate.search_temperature(lambda group: [float("nan")] * len(group)) == 1.0


@pytest.mark.parametrize(
    ("lines", "batch_size", "stripes"),
    [(3370, 64, 33), (3760, 64, 37), (50, 64, 1), (10**6, 128, 128)],
)
def test_stripes_have_enough_lines(lines, batch_size, stripes):
    class Task:
        num_lines = staticmethod(lambda split: lines)

    assert evaluate.num_stripes(Task, "valid", batch_size, 100) == stripes


@pytest.mark.slow
def test_a_turn_scores_training_data_temperature_and_validation(small):
    settings = dict(temperature_tokens=100, lines_per_stripe=10, train_windows=2)
    settings = configs.base({"evaluation": settings}).evaluation
    turn = evaluate.TurnEvaluation(small.model, small.task, settings, batch_size=4, window=6)
    assert turn.search_windows == 100 // 4 // 6
    scores = turn(small.params)
    plan = small.task.plan("train", 4)
    train = evaluate.Deterministic(small.model, plan).sums(small.params, [1.0], 2)
    assert scores.train_nats == pytest.approx(train.total[0] / train.count, rel=1e-6)
    assert scores.temperature in evaluate.TEMPERATURES
    stripes = evaluate.num_stripes(small.task, "valid", 4, 10)
    assert stripes == 3
    valid = evaluate.Deterministic(small.model, small.task.plan("valid", stripes))
    for temperature in (scores.temperature, 1.0):
        expected = valid(small.params, temperature).mean()
        found = turn.score("valid", small.params, temperature)
        assert found == pytest.approx(expected, rel=1e-6)
    assert scores.valid_nats != pytest.approx(valid(small.params).mean(), rel=1e-6)
    fixed = dict(softmax_temperature=0.9, max_windows=1, train_windows=1)
    fixed = configs.base({"evaluation": fixed}).evaluation
    turn = evaluate.TurnEvaluation(small.model, small.task, fixed, batch_size=4, window=6)
    assert turn(small.params).temperature == 0.9


def test_means_of_parts_combine_to_the_mean_of_all():
    a = evaluate.Sum(jnp.array([1.0, 2.0]), jnp.array([1, 2]))
    b = evaluate.Sum(jnp.array([6.0, 0.0]), jnp.array([1, 0]))
    assert jax.tree.map(jnp.add, a, b).mean() == 9 / 4
    assert (a.mean() + b.mean()) / 2 != 9 / 4
    total = jax.jit(lambda x: jax.tree.map(jnp.sum, x))(a)
    assert isinstance(total, evaluate.Sum) and total.mean() == 1.0
    # Float32 would lose the ones.
    many = evaluate.Sum(np.float32([2**25, 1, 1, 1, 1]), np.int32([1] * 5))
    assert many.mean() == (2.0**25 + 4) / 5
    assert math.isnan(evaluate.Sum(0.0, 0).mean())
