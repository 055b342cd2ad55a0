"""Drawing text: what is drawn, what it goes on from, how it is shown, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import (
    loaded_run,
    loading,
    sample_command,
    text_sampling,
    trained_model,
)
from mogrifier_jax.nn import models
from tests import quick

TEXT = "ab cd\nfish été\n"
LEVELS = {level: vocabularies.Vocabulary.from_text(TEXT, level) for level in vocabularies.LEVELS}
VOCAB = LEVELS["character"]


@functools.cache
def make_sampler(level="character", initial_state=False):
    """A model that has learnt nothing, made to have opinions."""
    vocab = LEVELS[level]
    model = models.LanguageModel(
        len(vocab),
        hidden_size=6,
        embedding_size=6,
        num_layers=1,
        cell_options={"rounds": 2, "rank": 2},
        trainable_initial_state=initial_state,
    )
    params = quick.jit(model.init)(jax.random.key(1), **model.example())["params"]
    params = jax.tree.map(lambda p: 6 * p + 0.1, params)
    return trained_model.TrainedModel(loaded_run.LoadedRun({}, model, vocab, params, None, {}))


def draw(sampler=None, prompt=None, **options):
    drawn = (sampler or make_sampler()).draw(text_sampling.Sampling(**options), prompt)
    return np.concatenate(list(drawn), axis=1)


def run(prompt=None, **options):
    sample_command.print_samples("runs/x", text_sampling.Sampling(**options), prompt)


@functools.cache
def compiled(sampler):
    return quick.jit(functools.partial(sampler.model.apply, method="logits"))


def logits_after(ids, sampler=None):
    """What the model says after these ids, read in one piece from the beginning of a line."""
    sampler = sampler or make_sampler()
    inputs = np.append(VOCAB.eos_id, ids).astype(np.int32)[None]
    padded = np.pad(inputs, ((0, 0), (0, 40 - inputs.shape[1])))  # One shape, one program.
    _, logits = compiled(sampler)({"params": sampler.params}, padded)
    return np.asarray(logits[0, inputs.shape[1] - 1])


@pytest.mark.parametrize("prompt", [None, "a", "fish", "ab cd\nfish ab cd\n"])
@pytest.mark.parametrize("initial_state", quick.mostly_slow([False, True], False))
def test_the_likeliest_text_is_that_of_the_model(prompt, initial_state):
    """Prompts end before, in and after the first dispatch."""
    sampler = make_sampler(initial_state=initial_state)
    ids = draw(sampler, prompt=prompt, length=20, top_k=1)[0]
    text = np.array([], int) if prompt is None else VOCAB.encode(prompt)
    for drawn in ids:
        logits = logits_after(text, sampler)
        assert drawn == logits.argmax()
        text = np.append(text, drawn)
    careful = draw(sampler, prompt=prompt, length=20, temperature=1e-4)[0]
    np.testing.assert_array_equal(careful, ids)
    assert (draw(sampler, prompt=prompt, length=20)[0] != ids).any()


@pytest.mark.slow
def test_tokens_are_drawn_with_their_probabilities():
    count = 4000
    logits = logits_after(VOCAB.encode("ab"))

    def deviation(temperature, supposed):
        """The largest, in standard deviations, from probabilities at the supposed one."""
        ids = draw(prompt="ab", length=1, num_samples=count, temperature=temperature)
        expected = np.asarray(jax.nn.softmax(logits / supposed))
        found = np.bincount(ids[:, 0], minlength=len(VOCAB)) / count
        return abs((found - expected) / np.sqrt(expected / count)).max()

    assert deviation(1.0, 1.0) < 4.5 and deviation(2.0, 2.0) < 4.5
    assert deviation(2.0, 1.0) > 10 and deviation(1.0, 0.5) > 10


@pytest.mark.slow
def test_only_likely_tokens_are_drawn():
    probabilities = jax.nn.softmax(logits_after(VOCAB.encode("ab")))
    order = np.argsort(-probabilities)
    options = dict(prompt="ab", length=1, num_samples=400)
    seen = set(draw(**options, top_k=3)[:, 0])
    assert seen <= set(order[:3]) and len(seen) > 1
    share = float(probabilities[order[0]] + 0.5 * probabilities[order[1]])
    assert set(draw(**options, top_p=share)[:, 0]) == set(order[:2])
    assert set(draw(**options, top_p=1e-6)[:, 0]) == {order[0]}
    assert len(set(draw(**options)[:, 0])) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        *((None, None, 4), (1, None, 1), (2, None, 2), (9, None, 4)),
        *((None, 0.5, 1), (None, 0.7, 2), (None, 0.99, 4), (None, 1.0, 4), (3, 0.65, 2)),
    ],
)
def test_restrict(top_k, top_p, left):
    logits = jnp.log(jnp.array([[0.05, 0.6, 0.1, 0.25], [0.6, 0.25, 0.1, 0.05]]))
    found = text_sampling.Sampling(top_k=top_k, top_p=top_p).restrict(logits)
    assert np.isfinite(found).sum(-1).tolist() == [left, left]
    order = np.argsort(-logits[0])
    assert np.isfinite(found[0, order[:left]]).all()


@pytest.mark.parametrize(("min_p", "left"), [(None, 4), (0.1, 3), (0.4, 2), (0.5, 1), (1.0, 1)])
def test_min_p_leaves_tokens_by_their_share_of_the_likeliest(min_p, left):
    logits = jnp.log(jnp.array([[0.05, 0.6, 0.1, 0.25], [0.6, 0.25, 0.1, 0.05]]))
    found = np.isfinite(text_sampling.Sampling(min_p=min_p).restrict(logits))
    assert found.sum(-1).tolist() == [left, left]
    assert found[0, np.argsort(-logits[0])[:left]].all()


@pytest.mark.slow
def test_samples_differ_and_seeds_repeat():
    options = dict(prompt="ab", length=30, num_samples=3)
    first = draw(**options)
    assert first.shape == (3, 30)
    assert (first[0] != first[1]).any() and (first[1] != first[2]).any()
    np.testing.assert_array_equal(draw(**options), first)
    assert (draw(**options, seed=1) != first).any()


@pytest.mark.slow
def test_one_program_serves_every_prompt_length_and_temperature():
    sampler = make_sampler()
    draw(sampler, prompt="ab", length=3)
    size = sampler._draw_chunk._cache_size()
    draw(sampler, prompt="fish été ab cd\nfish", length=40, temperature=0.3, seed=4)
    draw(sampler, length=1)
    assert sampler._draw_chunk._cache_size() == size
    draw(sampler, length=1, top_k=5)
    assert sampler._draw_chunk._cache_size() == size + 1


@pytest.mark.parametrize("level", LEVELS)
def test_pieces_join_to_the_whole_text(level):
    """Words need spaces between dispatches; a character may have its bytes in two of them."""
    vocab = LEVELS[level]
    begin, rest = vocab.encode("ab "), vocab.encode("fish été\nab été\n\nfish été\nab")
    whole = vocab.decode(np.concatenate([begin, rest]))
    for size in (1, 2, 5):
        drawn = [rest[None, i : i + size] for i in range(0, len(rest), size)]
        pieces = list(text_sampling.decode_pieces(vocab, begin, iter(drawn)))
        assert "".join(pieces) == whole
        assert len(pieces) == len(drawn) and sum(map(bool, pieces)) > 1
    assert "été\nab" in whole


@pytest.fixture
def loaded(monkeypatch):
    """What `run` finds in any workdir."""
    sampler = make_sampler()
    found = loaded_run.LoadedRun({}, sampler.model, VOCAB, sampler.params, None, {})
    monkeypatch.setattr(loading, "load_run", lambda *_: found)


@pytest.mark.slow
def test_one_sample_streams_and_several_follow_each_other(loaded, capsys, monkeypatch):
    run(prompt="ab", length=40, temperature=1.0, seed=3)
    text = capsys.readouterr().out
    ids = np.concatenate([VOCAB.encode("ab"), draw(prompt="ab", length=40, seed=3)[0]])
    assert text == VOCAB.decode(ids) + "\n" and text.startswith("ab")
    printed = []
    monkeypatch.setattr("builtins.print", lambda *args, **options: printed.append(options))
    run(prompt="ab", length=40)
    assert len(printed) == 4 and all(options["flush"] for options in printed[:-1])
    monkeypatch.undo()


def test_several_samples_are_numbered(loaded, capsys):
    run(prompt="ab", length=20, num_samples=2)
    lines = capsys.readouterr().out
    first, second = lines.removeprefix("--- sample 1\n").split("\n--- sample 2\n")
    rows = draw(prompt="ab", length=20, num_samples=2)
    for text, ids in zip((first, second.removesuffix("\n")), rows, strict=True):
        assert text == VOCAB.decode(np.concatenate([VOCAB.encode("ab"), ids]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, "length 0 must be at least 1"),
        ({"length": -5}, "length -5 must be at least 1"),
        ({"temperature": 0.0}, "temperature 0.0 must be at least 0.0001"),
        ({"temperature": -1.0}, "temperature -1.0 must be at least 0.0001"),
        ({"temperature": float("nan")}, "temperature nan must be a finite number"),
        ({"top_k": 0}, "top_k 0 must be at least 1, or left out"),
        ({"top_p": 0.0}, "top_p 0.0 must be at least 1e-06, or left out"),
        ({"top_p": 1.5}, "top_p 1.5 must be at most 1.0, or left out"),
        ({"min_p": 0.0}, "min_p 0.0 must be at least 1e-06, or left out"),
        ({"num_samples": 0}, "num_samples 0 must be at least 1"),
        ({"prompt": ""}, "the prompt '' is empty; leave it out to start from the beginning"),
        ({"prompt": "abZü"}, "the prompt has 'Z', 'ü', which the training text did not have"),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(loaded, options, words):
    with pytest.raises(errors.UsageError) as refused:
        prompt = options.get("prompt")
        rest = {key: value for key, value in options.items() if key != "prompt"}
        make_sampler().draw(
            text_sampling.Sampling(**rest), prompt
        )  # Nothing is drawn of what it gives.
    assert words in str(refused.value)
    with pytest.raises(errors.UsageError) as refused:
        run(**options)
    assert words in str(refused.value)


def test_prompts_of_words_and_bytes():
    words, data = LEVELS["word"], LEVELS["byte"]
    with pytest.raises(errors.UsageError, match="the prompt has 'dog', which"):
        text_sampling.encode_prompt(words, "ab dog")
    with pytest.raises(errors.UsageError, match="the prompt '  ' is empty"):
        text_sampling.encode_prompt(words, "  ")
    with pytest.raises(errors.UsageError, match="the prompt has '0x7a', which"):
        text_sampling.encode_prompt(data, "abz")
    assert len(text_sampling.encode_prompt(data, "été")) == 5


def test_the_copy_task_cannot_be_sampled():
    model = models.EncoderDecoder(5, 4, 4)
    found = loaded_run.LoadedRun({}, model, VOCAB, {}, None, {"workdir": "runs/x"})
    with pytest.raises(
        errors.UsageError, match="runs/x copies sequences; give the workdir of a language"
    ):
        trained_model.TrainedModel(found)
