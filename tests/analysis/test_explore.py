"""The page of `--mode=explore`: its data, what it refuses, and what a browser shows of it."""

import base64
import json
import math
import pathlib
import re
import zlib

import numpy as np
import pytest

import mogrifier_jax
from experiments import text as experiment
from mogrifier_jax import errors
from mogrifier_jax.analysis import explore, explore_data, gate_statistics
from mogrifier_jax.data import vocabularies
from tests import browser as browsers
from tests import workdir

TEXT = "".join(f"{'abcdefgh'[i % 8] * (i % 5 + 1)} {'xyz'[i % 3]}\n" for i in range(150))
SOME = "ab xz\n<a>b</script> Q bccd"  # Some of its characters are not in the vocabulary.
NAMES = ["c", "f", "i", "j", "o"]
ROUNDS = ["round1", "round2", "round3", "x_scale", "h_scale"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    options = dict(num_layers=2, hidden_size=6, rank=2)
    workdir.write(home / "mogrifier", TEXT, rounds=3, **options)
    workdir.write(home / "lstm", TEXT, rounds=0, **options)
    return home


@pytest.fixture(scope="module")
def models(folders):
    return [mogrifier_jax.load(folders / name) for name in ("mogrifier", "lstm")]


def make_words(folder, text="the cat sat on the mat\nand so on\n"):
    config = experiment.get_config("tiny")
    with config.unlocked():
        config.model.update(hidden_size=5, num_layers=1, rounds=1, rank=2)
        config.data.update(level="word", window=8)
    vocab = vocabularies.Vocabulary.from_text(text, "word")
    return mogrifier_jax.load(workdir.write_run(folder, config, vocab))


def unpack(index, packed):
    """The inverse of `explore_data.pack`."""
    data, arrays = zlib.decompress(base64.b64decode(packed)), {}
    for name, kind, size in index:
        width = int(kind[1])
        planes = np.frombuffer(data[: width * size], np.uint8).reshape(width, size)
        arrays[name] = np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()
        data = data[width * size :]
    assert not data
    return arrays


def data_of(page):
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html)
    return json.loads(content)


# What is in a page.


def test_arrays_are_packed_without_loss():
    arrays = {
        "floats": np.array([[1.5, -2e-7], [3e30, 0]], np.float32),
        "small": np.arange(-3, 300),
        "large": np.array([70_000, -1]),
        "none": np.zeros(0, np.int64),
    }
    index, packed = explore_data.pack(arrays)
    assert [kind for _, kind, _ in index] == ["f4", "i2", "i4", "i2"]
    for name, found in unpack(index, packed).items():
        np.testing.assert_array_equal(found, arrays[name].ravel())


@pytest.mark.parametrize(
    ("name", "high", "kind", "decimals"),
    [
        ("f", 1, "gate", 2),
        ("j", -1, "signed", 2),
        ("c", 500, "signed", 1),
        ("round1", 2, "factor", 3),
        ("x_scale", 8, "factor", 3),
        ("x_scale", 60, "factor", 2),
    ],
)
def test_maps_have_the_digits_that_are_shown(name, high, kind, decimals):
    values = np.linspace(0, high, 70).reshape(10, 7).astype(np.float32)
    about, parts = explore_data.make_map(name, values, rounds=6, max_units=7)
    assert (about["kind"], about["decimals"], about["units"]) == (kind, decimals, 7)
    shown = parts["values"] / 10.0**decimals
    assert abs(shown.T - values).max() <= 0.5001 * 10.0**-decimals
    np.testing.assert_allclose(parts["mean"], values.mean(1), rtol=1e-6)
    np.testing.assert_array_equal(parts["kept"], np.arange(7))


def test_of_too_many_units_those_that_vary_most_are_kept():
    values = np.ones((4, 5), np.float32)
    values[:, 1] = [0.5, 1, 1.5, 1]
    values[:, 3] = [0.1, 1, 1.9, 1]
    about, parts = explore_data.make_map("round1", values, rounds=1, max_units=2)
    assert about["units"] == 5 and parts["kept"].tolist() == [1, 3]
    np.testing.assert_array_equal(parts["values"], np.rint(1000 * values[:, [1, 3]].T))
    np.testing.assert_allclose(parts["mean"], values.mean(1), rtol=1e-6)  # Of all.


def test_maps_together_stay_within_the_limit():
    layers = [{"f": np.zeros((300, 200)), "i": np.zeros((300, 150))}] * 2
    assert explore_data.limit_units(layers, 300 * 700) == 200
    widest = explore_data.limit_units(layers, 300 * 699)
    assert widest == 174 and 4 * 300 * widest <= 300 * 699
    assert explore_data.limit_units(layers, 10) == 1


@pytest.mark.parametrize(
    ("level", "text", "length", "expected"),
    [
        ("word", "a b\nb a\n", 3, "a b\n"),
        ("word", "a  bb\nbb a", 2, "a  bb"),
        ("character", "a b\nb", 4, "a b\n"),
        ("character", "ab", 5, "ab"),
        ("byte", b"a\xffb\n", 2, b"a\xff"),
        ("byte", "aéb", 3, "aé"),
    ],
)
def test_a_text_is_cut_after_its_first_tokens(level, text, length, expected):
    vocab = vocabularies.Vocabulary.from_text("a b\n", level)
    found = explore.first_tokens(vocab, text, length)
    assert found.strip() == expected.strip()
    assert len(vocab.encode(found)) == min(length, len(vocab.encode(text)))


@pytest.mark.parametrize(
    ("level", "text", "expected"),
    [
        ("word", "a q\n<UNK> b ü", {1: "q", 3: "<UNK>", 5: "ü"}),
        ("character", "aq\nü", {1: "q", 3: "ü"}),
        ("byte", b"a\xff\nq", {1: "0xff", 3: "0x71"}),
        ("word", "a b", {}),
    ],
)
def test_unknown_tokens_keep_their_spelling(level, text, expected):
    vocab = vocabularies.Vocabulary.from_text("a b\n", level)
    assert explore.spell_unknown(vocab, text, vocab.encode(text)) == expected


def test_a_text_cannot_break_the_page(tmp_path):
    document = explore.fill({"tokens": ["</script><b>", "{{title}}", "\udcff"]}, "<a> & b")
    assert "<title>&lt;a&gt; &amp; b</title>" in document
    page = explore.Page(document, "<a> & b")
    assert data_of(page)["tokens"] == ["</script><b>", "{{title}}", "\udcff"]
    assert page.save(tmp_path / "page.html").read_text() == document
    frame = page._repr_html_()
    assert frame.count("<") == 2 and 'srcdoc="&lt;!doctype html&gt;' in frame
    with pytest.raises(errors.UsageError, match="none is not a folder; create it first"):
        page.save(tmp_path / "none" / "page.html")


def test_a_page_asks_nobody_for_anything():
    document = explore.fill({}, "")
    assert "default-src 'none'" in document
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|<link[^>]*href=\"[^d]|@import", document)
    assert set(re.findall(r"https?://[^\s\"'`]+", document)) == {"https://arxiv.org/abs/${paper}"}


@pytest.mark.parametrize(
    ("folders", "options", "words"),
    [
        ([""], {}, "--workdir is missing; give the workdir of a run, or two: a,b"),
        (["a", ""], {}, "--workdir is missing"),
        (["none"], {}, "workdir none does not exist"),
        (["none"], {"path": "a", "prompt": "b"}, "--text and --prompt are both given"),
        (["none"], {"length": 0}, "length 0 must be at least 1"),
        (["none"], {"length": 2_001}, "length 2001 must be at most 2000"),
        (["none"] * 5, {}, "5 runs are too many for a page; give 4 or less"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_is_loaded(folders, options, words):
    with pytest.raises(errors.UsageError) as refused:
        explore.write_page(folders, **options)
    assert words in str(refused.value)


@pytest.mark.slow
def test_texts_that_cannot_be_read_are_refused(folders, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    for options, words in (
        ({"prompt": ""}, "the text '' has no tokens; give some text"),
        ({"path": "none.txt"}, "none.txt does not exist; give a file of text"),
        ({"path": str(tmp_path / "empty.txt")}, "the text '' has no tokens"),
        ({"path": str(tmp_path / "picture.png")}, "is not UTF-8 text"),
    ):
        with pytest.raises(errors.UsageError) as refused:
            explore.write_page([str(folders / "mogrifier")], **options)
        assert words in str(refused.value)
    assert not (folders / "mogrifier" / "explore.html").exists()


@pytest.mark.slow
def test_runs_that_do_not_go_together_are_refused(folders, models, tmp_path):
    other = mogrifier_jax.load(folders / "lstm")
    other.vocabulary = vocabularies.Vocabulary.from_text("other\n", "character")
    with pytest.raises(errors.UsageError, match=r"different vocabularies \(14 and 7 tokens\); giv"):
        models[0].explore("ab", other)
    alone = mogrifier_jax.load(folders / "lstm")
    with alone.config.unlocked():
        alone.config.data.episodic = True
    with pytest.raises(errors.UsageError, match="models independent lines"):
        alone.explore("ab")


@pytest.mark.slow
def test_runs_have_names_of_their_own(models):
    mogrifier, lstm = models
    assert explore.name_runs([mogrifier, lstm]) == ["Mogrifier", "LSTM"]
    assert explore.name_runs([lstm, lstm]) == ["LSTM lstm 1", "LSTM lstm 2"]


@pytest.mark.slow
def test_a_page_holds_scores_predictions_and_gates(models):
    page = models[0].explore(SOME, models[1])
    data = data_of(page)
    assert [data["words"][i] for i in data["tokens"]] == models[0].score(SOME).tokens
    assert data["spelling"] == {str(SOME.index(c)): c for c in "<>/sript" if c in SOME} | {
        str(place): c for place, c in enumerate(SOME) if c not in TEXT
    }
    for model, run in zip(models, data["runs"], strict=True):
        found = unpack(run["index"], run["data"])
        score, expected = model.score(SOME), model.predict(SOME, top=explore_data.TOP)
        np.testing.assert_allclose(found["bits"], score.nats / math.log(2), rtol=1e-6)
        assert run["bits_per_token"] == score.bits_per_token
        np.testing.assert_allclose(found["probabilities"], expected.probabilities.ravel())
        words = [data["words"][i] for i in found["ids"]]
        assert words == [model.vocabulary.tokens[i] for i in expected.ids.ravel()]
        for number, layer in enumerate(model.gates(SOME).layers):
            named = gate_statistics.name_gates(layer)
            assert [about["name"] for about in run["layers"][number]] == list(named)
            for about in run["layers"][number]:
                values = np.asarray(named[about["name"]])
                key = f"{number}/{about['name']}"
                shown = found[f"{key}/values"].reshape(values.shape[::-1]).T
                bound = 0.5001 * 10.0 ** -about["decimals"]
                assert abs(shown * 10.0 ** -about["decimals"] - values).max() <= bound
                np.testing.assert_allclose(found[f"{key}/mean"], values.mean(1), atol=1e-6)
            if run["rounds"]:
                strength = found[f"{number}/h_scale/strength"]
                np.testing.assert_allclose(
                    strength, gate_statistics.strength(named["h_scale"]), rtol=1e-5
                )
    mogrifier, lstm = data["runs"]
    assert sorted(about["name"] for about in mogrifier["layers"][0]) == sorted(NAMES + ROUNDS)
    assert sorted(about["name"] for about in lstm["layers"][1]) == NAMES and lstm["rounds"] == 0


@pytest.fixture(scope="module")
def rewired(folders):
    options = dict(num_layers=1, hidden_size=6, rank=2, rounds=2, cell="rewired_lstm")
    return mogrifier_jax.load(workdir.write(folders / "rewired", TEXT, **options))


@pytest.mark.slow
def test_a_page_of_the_rewired_lstm_holds_its_gates(rewired):
    (run,) = data_of(rewired.explore(SOME))["runs"]
    assert run["name"] == "Mogrifier RLSTM" and run["cell"] == "rewired_lstm"
    assert {about["name"] for about in run["layers"][0]} >= {*NAMES, "round2", "x_scale"}
    # By this name the page knows that the flow is another one.
    script = (pathlib.Path(explore.__file__).parent / "explore.js").read_text(encoding="utf-8")
    assert 'run.cell === "rewired_lstm"' in script


@pytest.mark.slow
def test_predictions_agree_with_scores(models):
    """The token that comes has the probability and the place that the score gives it."""
    text = TEXT[:100]  # More than a window.
    model = models[0]
    score, ids = model.score(text), model.vocabulary.encode(text)
    every = model.predict(text, top=1_000)
    assert every.ids.shape == (101, len(model.vocabulary)) == every.probabilities.shape
    np.testing.assert_allclose(every.probabilities.sum(1), 1, rtol=1e-5)
    assert (np.diff(every.probabilities, axis=1) <= 0).all()
    own = every.ids[:-1] == ids[:, None].astype(int)
    np.testing.assert_allclose(-np.log(every.probabilities[:-1][own]), score.nats, rtol=1e-4)
    np.testing.assert_array_equal(own.argmax(1) + 1, every.ranks)
    p = every.probabilities.astype(np.float64)
    np.testing.assert_allclose(-(p * np.log(p)).sum(1), every.entropy_nats, rtol=1e-4)
    assert len(set(every.ranks.tolist())) > 3
    with pytest.raises(errors.UsageError, match="top 0 must be at least 1"):
        model.predict(text, top=0)


@pytest.mark.slow
def test_the_command_line_writes_into_the_first_workdir(folders, models, tmp_path, monkeypatch):
    both = [str(folders / name) for name in ("lstm", "mogrifier")]
    (tmp_path / "file.txt").write_text(TEXT)
    path = explore.write_page(both, path=str(tmp_path / "file.txt"), length=40)
    assert path == folders / "lstm" / "explore.html"
    data = data_of(explore.Page(path.read_text(), ""))
    assert data["source"].endswith(f"file.txt, the first 40 of {len(TEXT)} tokens")
    assert [data["words"][i] for i in data["tokens"]] == models[0].score(TEXT[:40]).tokens
    assert [run["name"] for run in data["runs"]] == ["LSTM", "Mogrifier"]
    path.unlink()
    # The validation text, unless told otherwise: here of a corpus that is this text.
    (tmp_path / "corpus.txt").write_text(TEXT)
    monkeypatch.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path / "cache"))
    config = experiment.get_config("tiny")
    with config.unlocked():
        config.model.update(hidden_size=4, num_layers=1, rounds=2)
        config.data.update(path=str(tmp_path / "corpus.txt"))
    vocab = vocabularies.Vocabulary.from_text(TEXT, config.data.level)
    folder = workdir.write_run(tmp_path / "run", config, vocab)
    data = data_of(explore.Page(explore.write_page([str(folder)], length=30).read_text(), ""))
    assert data["source"] == "the validation text of text" and len(data["tokens"]) == 30
    shown = "".join(data["words"][i] for i in data["tokens"]).replace(vocabularies.EOS, "\n")
    assert shown in TEXT and not TEXT.startswith(shown)
    # All of it, if there is no more.
    data = data_of(explore.Page(explore.write_page([str(folder)]).read_text(), ""))
    assert 30 < len(data["tokens"]) < 100


@pytest.mark.slow
def test_many_values_are_left_out_before_a_file_gets_large(models, monkeypatch):
    monkeypatch.setattr(explore_data, "MAX_VALUES", 2_000)
    (run,) = data_of(models[0].explore(TEXT[:50]))["runs"]
    found = unpack(run["index"], run["data"])
    sizes = [len(found[f"0/{name}/kept"]) for name in NAMES + ROUNDS]
    assert sizes == [2] * 10 and {about["units"] for about in run["layers"][0]} == {6}
    assert sum(size for name, _, size in run["index"] if name.endswith("values")) == 2_000


@pytest.mark.slow
def test_a_run_without_finite_scores_is_refused(folders):
    model = mogrifier_jax.load(folders / "lstm")
    model.params = {**model.params, "embedding": model.params["embedding"] * np.float32("nan")}
    with pytest.raises(errors.UsageError, match="are not finite, so it has diverged"):
        model.explore("ab")


# What a browser shows.

needs_browser = pytest.mark.skipif(
    not (browsers.BINARY and browsers.DRIVER), reason="chromium and chromedriver are not installed"
)
RIGHT, DOWN = "\ue014", "\ue015"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page; at the end, it has asked for nothing else and had no errors."""
    address = (tmp_path / "explore.html").as_uri()

    def show(page, fragment=""):
        page.save(tmp_path / "explore.html")
        browser.open(address + fragment)
        wait = "const look = (done) => document.body.dataset.ready ? done() : setTimeout(look, 5, "
        browser.run(f"return new Promise((done) => {{ {wait}done); look(done); }})")

    yield show
    assert browser.logs("browser") == []
    assert {address.partition("#")[0] for address in browser.requests()} == {address}


def number(text):
    (found,) = re.findall(r"[−\d.]+", text)
    return float(found.replace("−", "-"))


def text_of(browser, selector):
    return browser.run("return document.querySelector(arguments[0]).textContent", selector)


def rows(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map((row) => [...row.children]"
    return browser.run(script + ".map((cell) => cell.textContent))", selector)


def centre(browser, selector):
    script = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); "
    return browser.run(script + "return [r.x + r.width / 2, r.y + r.height / 2]", selector)


def cell_of(browser, heat, row, token):
    """Where a cell of a heat map is on the screen, and which unit it is."""
    script = """
    const heat = heats[arguments[0]], [row, token] = [arguments[1], arguments[2]];
    heat.canvas.scrollIntoView({ block: "center" });
    const r = heat.canvas.getBoundingClientRect();
    const y = (row + 0.5) * heat.height / heat.order.length;
    return [r.x + left(token) + view.column / 2, r.y + y, heat.m.kept[heat.order[row]]];
    """
    return browser.run(script, heat, row, token)


def check_card(browser, models, token):
    """The numbers and lists of the card are those of the models."""
    facts = {name: values for name, *values in rows(browser, "#facts tr[data-fact]")}
    lists = {name: rows(browser, f"#{name} .guess") for name in ("expected", "following")}
    for column, model in enumerate(models):
        score, every = model.score(SOME), model.predict(SOME, top=explore_data.TOP)
        bits = score.nats[token] / math.log(2)
        assert number(facts["surprisal"][column]) == pytest.approx(bits, abs=5.01e-4)
        shown = number(facts["probability"][column])
        assert shown == pytest.approx(100 * 2**-bits, abs=0.0501)
        assert facts["rank"][column] == str(every.ranks[token])
        after = every.entropy_nats[token + 1] / math.log(2)
        assert number(facts["entropy after"][column]) == pytest.approx(after, abs=5.01e-4)
        for name, place in (("expected", token), ("following", token + 1)):
            found = lists[name][column * explore_data.TOP : (column + 1) * explore_data.TOP]
            for (word, _, p), i, exact in list(
                zip(found, every.ids[place], every.probabilities[place], strict=True)
            )[:-1]:  # The last one may be the token that comes.
                spelt = {" ": "␣", vocabularies.EOS: "↵", vocabularies.UNKNOWN: "unknown"}
                own = model.vocabulary.tokens[i]
                assert word == spelt.get(own, own)
                assert number(p) == pytest.approx(100 * exact, abs=0.0501) or p == "<0.1%"


def check_maps(browser, model, layer, token):
    """The means in the diagram are those of the gates."""
    named = gate_statistics.name_gates(model.gates(SOME).layers[layer])
    script = "return Object.fromEntries([...document.querySelectorAll('.node')].map((node) => "
    means = browser.run(script + "[node.dataset.map, node.querySelector('.value').textContent]))")
    assert set(means) == set(named)
    for name, values in named.items():
        exact = np.asarray(values)[token].mean()
        assert number(means[name]) == pytest.approx(exact, abs=5.02e-4)
    return named


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_what_the_model_computes(show, browser, models):
    show(models[0].explore(SOME, models[1]), "#theme=light")
    assert text_of(browser, "title") == "Mogrifier against LSTM: a text"
    tokens = models[0].score(SOME).tokens
    unknown = [c for c in SOME if c not in TEXT]
    assert browser.run("return spans.filter((s) => s.className.includes('unknown')).length") == len(
        unknown
    )
    # With the mouse.
    token = tokens.index("b")
    browser.point(*centre(browser, f"#text [data-token='{token}']"), click=True)
    assert text_of(browser, ".head .note").startswith(f"token {token + 1} of {len(tokens)}")
    check_card(browser, models, token)
    named = check_maps(browser, models[0], 0, token)
    # With keys: the next token, the second layer, and every map after the other.
    browser.press(RIGHT, "2")
    token += 1
    check_card(browser, models, token)
    named = check_maps(browser, models[0], 1, token)
    seen = []
    for key in ["]", DOWN] * 5:
        browser.press(key)
        name = browser.run("return document.querySelector('.node.chosen').dataset.map")
        seen.append(name)
        values = np.asarray(named[name])
        for row, place in ((0, 3), (4, token)):
            x, y, unit = cell_of(browser, 0, row, place)
            browser.point(x, y)
            readout = text_of(browser, "#readout")
            assert readout.startswith(f"token {place + 1} ") and f"unit {unit}: " in readout
            decimals = 3 if name in ROUNDS else 2
            value = number(text_of(browser, "#readout b:last-of-type"))
            assert value == pytest.approx(values[place, unit], abs=0.501 * 10.0**-decimals)
            hovered = browser.run("return document.querySelector('#text .hover').dataset.token")
            assert hovered == str(place)
            mean = number(text_of(browser, "#lane-mean b"))
            assert mean == pytest.approx(values[place].mean(), abs=5.02e-4)
    assert sorted(seen) == sorted(NAMES + ROUNDS)
    assert number(text_of(browser, "#lane-strength b")) == pytest.approx(
        float(gate_statistics.strength(named["x_scale"])[token]), abs=5.02e-4
    )


@pytest.mark.slow
@needs_browser
def test_names_and_sentences_are_those_of_the_paper(show, browser, models):
    show(models[0].explore("ab x", models[1]), "#map=round1&token=2")
    said = {name: "" for name in ("round1", "round2", "round3")}
    for name in said:
        said[name] = text_of(browser, "#sentence")
        browser.press("]")
    assert "round 1 of 3: x1 = 2σ(Q1 h0prev) ⊙ x-1" in said["round1"]
    assert "h2prev = 2σ(R2 x1) ⊙ h0prev" in said["round2"] and "equation 2" in said["round2"]
    assert "x3 = 2σ(Q3 h2prev) ⊙ x1" in said["round3"] and "equation 1" in said["round3"]
    assert "gates of rounds 1, 3" in text_of(browser, "#sentence")
    assert text_of(browser, ".missing").startswith("LSTM has no ∏ on x: it has no rounds")
    browser.press("r")
    assert "LSTM has no Mogrifier rounds (rounds = 0)" in text_of(browser, "#sentence")
    assert browser.run("return heats.length") == 2  # f of both.


@pytest.mark.slow
@needs_browser
def test_runs_and_tokens_are_compared(show, browser, models):
    text = "abc x\nbbc y\n"
    show(models[0].explore(text, models[1]), "#token=2")
    bits = [model.score(text).nats / math.log(2) for model in models]
    colours = "return spans.map((span) => span.style.backgroundColor)"
    before = browser.run(colours)
    browser.press("s")
    assert text_of(browser, "#shades [aria-pressed=true]") == "Mogrifier − LSTM"
    shaded = browser.run(colours)
    apart = bits[0] - bits[1]
    reds = [int((re.findall(r"\d+", colour) or [0])[0]) for colour in shaded]
    worse, better = (np.array(reds)[where] for where in (apart > 0, apart < 0))
    assert shaded != before and len(worse) and len(better)
    assert min(worse) > max(better)  # Magenta, and teal.
    # The same token in two contexts: it is pinned, and the next one is found.
    browser.press("p", "n")
    places = [place for place, c in enumerate(text) if c == "b"]
    assert places[0] == 1
    picked = browser.run("return [state.pin, state.token]")
    assert picked == places[:2]
    facts = {name: values for name, *values in rows(browser, "#comparison tr[data-fact]")}
    shown = [number(value) for value in facts["surprisal"]]
    assert shown == pytest.approx(bits[0][[places[1], places[0]]], abs=5.01e-4)
    assert shown[0] != shown[1]
    browser.press("\ue00c")  # Escape.
    assert browser.run("return document.getElementById('comparison')") is None


@pytest.mark.slow
@needs_browser
def test_words_and_every_switch_work(show, browser, tmp_path):
    model = make_words(tmp_path / "run")
    show(model.explore("the dog sat on\nthe mat"))
    assert [word for word, *_ in rows(browser, "#following .guess")]
    assert text_of(browser, "#text").split() == "the dog sat on ↵ the mat".split()
    assert text_of(browser, "#text .unknown") == "dog" and "1 unknown" in text_of(
        browser, "#source"
    )
    themes = {browser.run("return document.documentElement.dataset.theme")}
    for key in ["t", *"ooooocccsss++++---1290"]:
        browser.press(key)
    themes.add(browser.run("return document.documentElement.dataset.theme"))
    assert themes == {"light", "dark"}
    x, y, unit = cell_of(browser, 0, 1, 2)
    browser.point(x, y, click=True)
    assert browser.run("return [state.token, state.unit]") == [2, unit]
    browser.press("s")
    assert text_of(browser, "#shades [aria-pressed=true]") == f"unit {unit}"


@pytest.mark.slow
@needs_browser
def test_unknown_words_look_alike_and_are_counted_apart_from_the_corpus_own(
    show, browser, tmp_path
):
    model = make_words(tmp_path / "run", "the cat sat on the mat\nand so on <unk>\n")
    show(model.explore("the dog sat on the <unk> wolfhound mat <unk>"), "#token=2")
    script = "return [...document.querySelectorAll(arguments[0])].map((s) => s.textContent)"
    assert browser.run(script, "#text .unknown") == ["dog", "wolfhound"]
    assert browser.run(script, "#text .rare") == ["<unk>", "<unk>"]
    assert text_of(browser, "#source").endswith(
        "2 unknown to the vocabulary, underlined; 2 written <unk> by the corpus, dotted."
    )
    assert text_of(browser, "#next") == "next unknown word, 2 in all"
    assert text_of(browser, "#expected .real code") == "unknown"
    browser.press(RIGHT)
    assert text_of(browser, "#next") == "next sat, 1 in all"  # Control.


@pytest.mark.slow
@needs_browser
def test_words_stay_in_their_box_and_ticks_on_the_canvas(show, browser, tmp_path):
    model = make_words(tmp_path / "run")
    show(model.explore("the dog incomprehensibilities sat on the mat"))
    for token in range(7):
        browser.run("update({ token: arguments[0] })", token)
        script = "const g = document.querySelector('.glyph'); return [g.scrollWidth, g.clientWidth]"
        inside, box = browser.run(script)
        assert inside <= box, token
    # What is drawn at the edge of the axis would be cut off.
    show(model.explore("the mat " * 500, length=1000), "#token=1")
    edge = """
    const c = document.getElementById("axis"), width = 30;
    const { data } = c.getContext("2d").getImageData(c.width - width, 0, width, c.height);
    const last = data.filter((_, k) => Math.floor(k / 4) % width === width - 1);
    return [last, data].map((values) => values.some((value) => value > 0));
    """
    assert browser.run(edge) == [False, True]


@pytest.mark.slow
@needs_browser
def test_a_phone_shows_everything_in_its_width(show, browser, models):
    page = models[0].explore(SOME * 8, models[1])
    show(page)
    wide = browser.run("return [GUTTER, view.count, view.column]")
    browser.resize(390, 800)
    try:
        show(page, "#theme=dark")
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        gutter, count, column = browser.run("return [GUTTER, view.count, view.column]")
        assert gutter < wide[0] and count < wide[1] == len(SOME) * 8 and column >= 7 > wide[2] / 2
        token = browser.run("return state.token")
        browser.run("document.getElementById('forth').scrollIntoView()")
        browser.point(*centre(browser, "#forth"), click=True)
        assert browser.run("return state.token") == token + 1
    finally:
        browser.resize(1400, 1100)


@pytest.mark.slow
@needs_browser
def test_the_flow_of_the_rewired_lstm_is_shown(show, browser, rewired, models):
    show(rewired.explore(SOME, models[0]), "#map=f")
    script = "return [...document.querySelectorAll('.node')].map((node) => node.dataset.map)"
    gates = [name for name in browser.run(script) if name in NAMES]
    assert gates == ["i", "j", "f", "c", "o"]
    assert "i ⊙ j" in text_of(browser, "#sentence")
    assert "2211.01848" in text_of(browser, "#sentence")
    show(models[0].explore(SOME), "#map=f")
    assert "i ⊙ j" not in text_of(browser, "#sentence")


@pytest.mark.slow
@needs_browser
def test_errors_and_requests_would_be_seen(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>fetch('http://127.0.0.1:9/').catch(() => 0); none.x</script>")
    browser.open(page.as_uri())
    assert "none is not defined" in browser.logs("browser")[0]["message"]
    assert "http://127.0.0.1:9/" in browser.requests()
