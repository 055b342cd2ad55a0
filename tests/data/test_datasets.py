"""Corpora: found, fetched, checked, prepared whole or not at all, and read back."""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

import numpy as np
import pytest
import tensorflow_datasets as tfds
from absl import logging

from mogrifier_jax import errors, files
from mogrifier_jax.data import corpora, datasets
from mogrifier_jax.data.datasets import base, enwik8, mwc, ptb, sources, text8

TEXTS = {"ptb.train.txt": b" a b <unk>\n c\n", "ptb.valid.txt": b" a\n", "ptb.test.txt": b" b z\n"}
REAL = os.environ.get("MOGRIFIER_DATA_DIR")
needs_corpora = pytest.mark.skipif(
    not REAL, reason="MOGRIFIER_DATA_DIR does not name a folder with the corpora"
)


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch, tmp_path):
    """Nothing is read from or written to the user's own folders."""
    monkeypatch.delenv("MOGRIFIER_DATA_DIR", raising=False)
    monkeypatch.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def small_ptb(monkeypatch):
    """The builder of ptb for TEXTS, with no mirrors."""
    files = tuple(
        sources.File(name, len(text), hashlib.sha256(text).hexdigest())
        for name, text in TEXTS.items()
    )
    source = dataclasses.replace(ptb.Ptb.SOURCE, files=files, urls=("http://127.0.0.1:9/{file}",))
    monkeypatch.setattr(ptb.Ptb, "SOURCE", source)
    return source


def write(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def make_zip(contents, prefix=""):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in contents.items():
            archive.writestr(prefix + name, content)
    return buffer.getvalue()


def make_tgz(contents, prefix=""):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


LAYOUTS = {
    "flat": lambda: TEXTS,
    "folder": lambda: {f"ptb/{name}": text for name, text in TEXTS.items()},
    "gz": lambda: {f"{name}.gz": gzip.compress(text) for name, text in TEXTS.items()},
    "xz": lambda: {f"ptb/{name}.xz": lzma.compress(text) for name, text in TEXTS.items()},
    "tgz": lambda: {"simple-examples.tgz": make_tgz(TEXTS, "./simple-examples/data/")},
    "zip": lambda: {"ptb/ptbdataset.zip": make_zip(TEXTS)},
    "unpacked": lambda: {f"simple-examples/data/{name}": text for name, text in TEXTS.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_may_hold_the_files_in_any_form(small_ptb, tmp_path, layout):
    (tmp_path / "ptb").mkdir()
    (tmp_path / "simple-examples/data").mkdir(parents=True)
    write(tmp_path, LAYOUTS[layout]())
    assert sources.load(small_ptb, tmp_path) == tuple(TEXTS.values())


def test_a_corpus_is_prepared_encoded_and_read_back(small_ptb, tmp_path):
    source_dir = write(tmp_path / "files", TEXTS)
    corpus = corpora.load_corpus("ptb", source_dir=source_dir)
    assert corpus.vocabulary.tokens == ("<UNK>", "<unk>", "a", "b", "c", "▼")
    assert corpus.train.tokens.tolist() == [2, 3, 1, 5, 4, 5]
    assert corpus.train.line_starts.tolist() == [0, 4]
    assert corpus.test.tokens.tolist() == [3, 0, 5]
    assert (corpus.name, corpus.unit) == ("ptb", "word")
    # From now on the files are not needed, and tfds finds the data by name.
    again = corpora.load_corpus("ptb")
    np.testing.assert_array_equal(again.train.tokens, corpus.train.tokens)
    for split, text in zip(corpora.SPLITS, TEXTS.values(), strict=True):
        source = tfds.data_source("ptb", split=split, data_dir=tmp_path / "cache")
        assert len(source) == 1 and source[0]["text"].tobytes() == text


def test_preparing_a_corpus_from_files_says_nothing_about_downloads(
    small_ptb, tmp_path, monkeypatch, capsys
):
    load = functools.partial(corpora.load_corpus, "ptb", source_dir=write(tmp_path / "a", TEXTS))
    load()
    assert "Downloading" not in "".join(capsys.readouterr())
    # Control: tfds does say so.
    monkeypatch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
    load(data_dir=tmp_path / "other")
    assert "Downloading" in capsys.readouterr().out


def test_tfds_logs_nothing_about_a_text_and_our_own_messages_are_kept(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "book.txt").write_text("some words\n" * 30)
    load = functools.partial(corpora.load_corpus, "text", path=str(tmp_path / "book.txt"))
    with caplog.at_level("INFO"):
        load()
        load()
        assert not caplog.records
        logging.info("ours")
        assert [record.message for record in caplog.records] == ["ours"]
        # Control: tfds does log.
        monkeypatch.setattr(base, "_quiet", contextlib.nullcontext)
        load()
    assert "Using custom data configuration" in caplog.text


def test_large_texts_span_records(small_ptb, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_RECORD_BYTES", 4)
    source_dir = write(tmp_path / "files", TEXTS)
    builder = base.prepare(functools.partial(ptb.Ptb, data_dir=tmp_path / "cache"), source_dir)
    assert builder.info.splits["train"].num_examples == len(builder.as_data_source("train")) == 4
    assert base.read(builder, "train").tobytes() == TEXTS["ptb.train.txt"]


def damaged(name, content):
    return {**TEXTS, name: content}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (damaged("ptb.train.txt", b""), "ptb.train.txt is empty"),
        (damaged("ptb.train.txt", b" a b"), "ptb.train.txt has 4 bytes, not 14"),
        (damaged("ptb.valid.txt", b" z\n"), "ptb.valid.txt has the sha256"),
        ({"ptb.train.txt": TEXTS["ptb.train.txt"]}, "lacks ptb.valid.txt, ptb.test.txt"),
        ({"simple-examples.tgz": make_tgz(TEXTS)[:-40]}, "truncated or damaged"),
        ({"ptbdataset.zip": make_zip(TEXTS)[:-40]}, "truncated or damaged"),
        ({"ptbdataset.zip": make_zip({"other.txt": b"x"})}, "holds no ptb.train.txt but other.txt"),
        (
            {f"{n}.gz": gzip.compress(t)[:-9] for n, t in TEXTS.items()},
            r"ptb.train.txt.gz: truncated or damaged",
        ),
        (
            {f"{n}.xz": lzma.compress(t)[:-9] for n, t in TEXTS.items()},
            r"ptb.train.txt.xz: truncated or damaged",
        ),
    ],
)
def test_unfit_files_are_named_with_the_remedy_and_prepare_nothing(
    small_ptb, tmp_path, contents, message
):
    source_dir = write(tmp_path / "files", contents)
    with pytest.raises(errors.UsageError, match=message) as error:
        corpora.load_corpus("ptb", source_dir=source_dir)
    for part in ("http://127.0.0.1:9/", "--config.data.source_dir", "MOGRIFIER_DATA_DIR"):
        assert part in str(error.value)
    assert not list((tmp_path / "cache").glob("ptb/*"))
    write(tmp_path / "good", TEXTS)  # And the next attempt succeeds.
    assert len(corpora.load_corpus("ptb", source_dir=tmp_path / "good").vocabulary) == 6


@contextlib.contextmanager
def serve(folder, truncate=()):
    """An http server on this machine; `truncate` names files it breaks off in the middle of."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def copyfile(self, source, outputfile):
            content = source.read()
            cut = any(self.path.endswith(name) for name in truncate)
            outputfile.write(content[: len(content) // 2] if cut else content)

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_mirrors_are_tried_in_order(small_ptb, tmp_path, monkeypatch):
    write(tmp_path / "site", TEXTS)
    write(tmp_path / "site/a", {"simple-examples.tgz": make_tgz(TEXTS, "data/")})
    write(tmp_path / "site/bad", {"ptb.zip": make_zip(damaged("ptb.test.txt", b"x"))})
    write(tmp_path / "site/cut", {"ptb.zip": make_zip(TEXTS)})
    with serve(tmp_path / "site", truncate=["cut/ptb.zip"]) as site:
        bad = ("http://127.0.0.1:9/x.zip", f"{site}/none.zip", f"{site}/bad/ptb.zip")
        bad = (*bad, f"{site}/cut/ptb.zip")
        for good in (f"{site}/a%2Fsimple-examples.tgz", f"{site}/{{file}}"):
            source = dataclasses.replace(small_ptb, urls=(*bad, good))
            assert sources.load(source) == tuple(TEXTS.values())
        monkeypatch.setattr(ptb.Ptb, "SOURCE", dataclasses.replace(small_ptb, urls=bad))
        with pytest.raises(errors.UsageError) as error:
            corpora.load_corpus("ptb")
    reasons = str(error.value).splitlines()
    assert "no answer" in reasons[1] and "404" in reasons[2] and "has 1 bytes" in reasons[3]
    assert "broke off" in reasons[4] or "IncompleteRead" in reasons[4]
    assert "Fetch ptb.train.txt" in reasons[5] and "MOGRIFIER_DATA_DIR" in reasons[5]
    assert not list((tmp_path / "cache").glob("ptb/*"))


def test_damaged_prepared_data_is_noticed(small_ptb, tmp_path):
    source_dir = write(tmp_path / "files", TEXTS)
    corpora.load_corpus("ptb", source_dir=source_dir)
    (record,) = (tmp_path / "cache").glob("ptb/*/ptb-train*")
    content = record.read_bytes()
    place = content.index(b"<unk>")
    record.write_bytes(content[:place] + b"<UNK>" + content[place + 5 :])
    with pytest.raises(errors.UsageError, match="damaged; delete that folder"):
        corpora.load_corpus("ptb")
    record.write_bytes(content)
    assert len(corpora.load_corpus("ptb").vocabulary) == 6


def test_old_leftovers_are_removed_and_young_ones_kept(small_ptb, tmp_path):
    folder = tmp_path / "cache" / "ptb"
    old, young = folder / "incomplete.OLD_1.0.0", folder / "incomplete.NEW_1.0.0"
    for path in (old, young):
        write(path, {"part": b"x"})
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    corpora.load_corpus("ptb", source_dir=write(tmp_path / "files", TEXTS))
    assert not old.exists() and young.exists()


WITHOUT_TENSORFLOW = """
import importlib.machinery, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "tensorflow" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
try:
    import tensorflow
except ImportError:
    pass
else:
    raise SystemExit("tensorflow is here")
"""


def start_python(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TENSORFLOW + script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )


def finish(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


# Stand-ins for all corpora, each prepared by its builder and read back by tfds.
ALL_BUILDERS = """
import dataclasses, functools, pathlib, sys
import tensorflow_datasets as tfds
from mogrifier_jax.data import corpora, datasets
from mogrifier_jax.data import corpora
from mogrifier_jax.data.datasets import base, enwik8, text, text8
files, out = map(pathlib.Path, sys.argv[1:])
enwik8._VALID, enwik8._TEST = text8._VALID, text8._TEST = 10, 13
for name, cls in datasets.BUILDERS.items():
    options = {}
    if name == "text":
        options = {"config": text.make_config(text.Options(path=str(files / "text.txt")))}
    elif name == "mwc":
        options = {"config": "fi"}
    else:
        unchecked = tuple(dataclasses.replace(f, size=None, sha256=None) for f in cls.SOURCE.files)
        cls.SOURCE = dataclasses.replace(cls.SOURCE, files=unchecked, urls=())
    builder = base.prepare(functools.partial(cls, data_dir=out, **options), files)
    if name == "text":
        source = tfds.builder_from_directory(builder.data_path).as_data_source()
    else:
        source = tfds.data_source("mwc/fi" if name == "mwc" else name, data_dir=out)
    for split in corpora.SPLITS:
        assert len(source[split]) == builder.info.splits[split].num_examples
        print(name, split, source[split][0]["text"].tobytes().decode())
assert "tensorflow" not in sys.modules
"""


def test_every_builder_works_without_tensorflow(tmp_path):
    expected = []
    for name, cls in datasets.BUILDERS.items():
        if name in ("text", "enwik8", "text8"):
            continue
        source = mwc.make_source("fi") if name == "mwc" else cls.SOURCE
        for file, split in zip(source.files, corpora.SPLITS, strict=True):
            path = tmp_path / "files" / source.folders[0] / file.path
            write(path.parent, {path.name: f"{name}-{split}".encode()})
            expected.append(f"{name} {split} {name}-{split}")
    write(tmp_path / "files", {"enwik8": b"0123456789abcdef", "text.txt": b"x\n" * 20})
    expected += ["enwik8 train 0123456789", "enwik8 valid abc", "enwik8 test def"]
    write(tmp_path / "files", {"text8": b"ab cdefghijklmno"})
    expected += ["text8 train ab cdefghi", "text8 valid jkl", "text8 test mno"]
    out = finish(start_python(ALL_BUILDERS, tmp_path / "files", tmp_path / "out"))
    lines = [line for line in out.splitlines() if line.strip("x") and line]
    assert sorted(lines) == sorted([*expected, *(f"text {split} x" for split in corpora.SPLITS)])
    assert out.splitlines().count("x") == 17  # Of 18 + 1 + 1 lines.


PREPARE = """
import sys
from mogrifier_jax.data import corpora
corpus = corpora.load_corpus("text", path=sys.argv[1], data_dir=sys.argv[2])
print(corpus.train.tokens.sum())
"""


@pytest.mark.slow
def test_two_processes_may_prepare_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 200_000)
    processes = [start_python(PREPARE, tmp_path / "a.txt", tmp_path / "out") for _ in range(2)]
    results = [finish(process) for process in processes]
    assert results[0] == results[1]
    (folder,) = (tmp_path / "out" / "text").iterdir()
    assert [path.name for path in folder.iterdir()] == ["1.0.0"]


def test_losing_the_race_is_no_error(small_ptb, tmp_path, monkeypatch):
    source_dir = write(tmp_path / "files", TEXTS)
    load_texts, make = ptb.Ptb.load_texts, functools.partial(ptb.Ptb, data_dir=tmp_path / "cache")

    def lose(self, source_dir):
        monkeypatch.setattr(ptb.Ptb, "load_texts", load_texts)
        base.prepare(make, source_dir)  # Another process finishes first.
        return load_texts(self, source_dir)

    monkeypatch.setattr(ptb.Ptb, "load_texts", lose)
    builder = base.prepare(make, source_dir)
    assert base.read(builder, "valid").tobytes() == TEXTS["ptb.valid.txt"]
    assert [path.name for path in (tmp_path / "cache/ptb").iterdir()] == ["1.0.0"]


def test_data_that_another_process_prepares_after_a_look_is_known(small_ptb, tmp_path):
    source_dir = write(tmp_path / "files", TEXTS)
    make = functools.partial(ptb.Ptb, data_dir=tmp_path / "cache")
    made = []

    def make_before():
        made.append(make())
        base.prepare(make, source_dir)
        return made[-1]

    builder = base.prepare(make_before, source_dir)
    assert base.read(builder, "valid").tobytes() == TEXTS["ptb.valid.txt"]
    with pytest.raises(errors.UsageError, match="is damaged"):  # Control: the first one.
        base.read(made[0], "valid")


def test_a_killed_preparation_leaves_nothing_that_counts_as_prepared(
    small_ptb, tmp_path, monkeypatch
):
    source_dir = write(tmp_path / "files", TEXTS)

    def die(self, text):
        yield 0, {"text": np.frombuffer(text[:3], np.uint8)}
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ptb.Ptb, "_generate_examples", die)
        with pytest.raises(KeyboardInterrupt):
            corpora.load_corpus("ptb", source_dir=source_dir)
    assert not (tmp_path / "cache/ptb/1.0.0").exists()
    assert corpora.load_corpus("ptb", source_dir=source_dir).train.tokens.shape == (6,)


def test_mwc_is_read_as_characters_from_its_layout(tmp_path):
    texts = {"tr": "Äiti ja isä\n", "va": "äidin\n", "te": "isän ☃\n"}
    for language in ("en", "fi"):
        for setting in ("ptb_format", "ptb_format_large"):
            folder = tmp_path / "mwc" / f"wiki_{language}" / setting
            marked = {
                k: (v if (language, setting) == ("fi", "ptb_format_large") else "no\n")
                for k, v in texts.items()
            }
            write(folder, {f"wiki_{language}.{k}.raw.unk": v.encode() for k, v in marked.items()})
    corpus = corpora.load_corpus("mwc", language="fi", source_dir=tmp_path)
    assert corpus.vocabulary.decode(corpus.train.tokens) == texts["tr"]
    assert corpus.vocabulary.decode(corpus.test.tokens) == "isä\ufffd \ufffd\n"
    english = corpora.load_corpus("mwc", language="en", source_dir=tmp_path)
    assert english.vocabulary.decode(english.train.tokens) == "no\n"
    with pytest.raises(errors.UsageError, match="'de' is unknown; use one of en, fi"):
        corpora.load_corpus("mwc", language="de", source_dir=tmp_path)


def test_text_comes_from_one_file_or_three(tmp_path):
    write(tmp_path, {"a.txt": b"".join(b"line %d\n" % i for i in range(20)), "b.txt": b"line x\n"})
    one = corpora.load_corpus("text", path=str(tmp_path / "a.txt"), level="word", fractions=None)
    assert [len(s.line_starts) for s in (one.train, one.valid, one.test)] == [18, 1, 1]
    assert one.vocabulary.decode(one.test.tokens) == "line <UNK>\n"
    other = corpora.load_corpus("text", path=str(tmp_path / "a.txt"), fractions=[0.5, 0.25, 0.25])
    assert [len(s.line_starts) for s in (other.train, other.valid, other.test)] == [10, 5, 5]
    names = dict(train="a.txt", valid="b.txt", test="b.txt")
    three = corpora.load_corpus("text", **{k: str(tmp_path / v) for k, v in names.items()})
    assert three.unit == "character" and len(three.train.line_starts) == 20
    # A file that changes is prepared anew.
    write(tmp_path, {"a.txt": b"other words\n" * 40})
    changed = corpora.load_corpus("text", path=str(tmp_path / "a.txt"), level="word")
    assert len(changed.train.line_starts) == 36


def test_text_is_decoded_as_told(tmp_path):
    write(tmp_path, {"latin.txt": "é\n".encode("latin-1") * 20})
    load = functools.partial(corpora.load_corpus, "text", path=str(tmp_path / "latin.txt"))
    with pytest.raises(errors.UsageError, match=r"latin.txt is not utf-8: .* at byte 0"):
        load()
    assert load(encoding="latin-1").vocabulary.tokens == ("<UNK>", "é", "▼")
    assert load(level="byte").vocabulary.tokens == ("<UNK>", "Θ", "▼")  # CP437's 0xe9.
    with pytest.raises(errors.UsageError, match="encoding 'utf-88' is unknown"):
        load(encoding="utf-88")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either path alone or all of"),
        ({"path": "a", "train": "b"}, "give either path alone or all of"),
        ({"train": "b"}, "give either path alone or all of"),
        ({"path": "absent.txt"}, "absent.txt cannot be read"),
        ({"path": "empty.txt"}, "empty.txt is empty"),
        ({"path": "short.txt"}, "has 3 lines, too few"),
        ({"path": "short.txt", "fractions": (0.5, 0.5, 0.5)}, "three above 0 with the sum 1"),
        ({"path": "short.txt", "level": "sentence"}, "word, character, byte"),
        ({"path": "short.txt", "language": "en"}, "no option 'language'; its options are path"),
    ],
)
def test_bad_text_options_are_refused(tmp_path, monkeypatch, options, message):
    write(tmp_path, {"empty.txt": b"", "short.txt": b"a\nb\nc\n"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UsageError, match=message):
        corpora.load_corpus("text", **options)


def test_bad_names_and_folders_are_refused(tmp_path, monkeypatch):
    with pytest.raises(errors.UsageError, match="'ptbb' is unknown; use one of ptb, ptb_char, "):
        corpora.load_corpus("ptbb")
    with pytest.raises(errors.UsageError, match="'ptb' has no option 'level'; it has none"):
        corpora.load_corpus("ptb", level="word")
    with pytest.raises(errors.UsageError, match="absent is not a folder"):
        corpora.load_corpus("ptb", source_dir=tmp_path / "absent")
    monkeypatch.setenv("MOGRIFIER_DATA_DIR", str(tmp_path / "gone"))
    with pytest.raises(errors.UsageError, match="gone is not a folder"):
        corpora.load_corpus("ptb")


def test_pydoc_needs_nothing_and_is_the_same_for_every_python(tmp_path):
    corpus = corpora.load_corpus("pydoc")
    splits = (corpus.train, corpus.valid, corpus.test)
    sizes = [len(split.line_starts) for split in splits]
    assert sizes == [round(sum(sizes) * 0.9), pytest.approx(sizes[2], abs=1), sizes[2]]
    assert [len(split.tokens) for split in splits] == [417_596, 21_720, 25_654]
    assert len(corpus.vocabulary) == 104
    assert "lambda" in corpus.vocabulary.decode(corpus.train.tokens[:200_000])
    np.testing.assert_array_equal(corpora.load_corpus("pydoc").test.tokens, corpus.test.tokens)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@needs_corpora
@pytest.mark.parametrize(
    ("name", "vocab_size", "num_tokens"),
    [
        ("ptb", 10_001, (929_589, 73_760, 82_430)),
        ("ptb_char", 51, (5_017_483, 393_043, 442_424)),
        ("wikitext2", 33_279, (2_088_628, 217_646, 245_569)),
        ("enwik8", 206, (90_000_001, 5_000_001, 5_000_001)),
    ],
)
def test_real_corpora_have_the_known_counts(name, vocab_size, num_tokens):
    corpus = corpora.load_corpus(name, source_dir=REAL)
    assert len(corpus.vocabulary) == vocab_size
    for split, count in zip((corpus.train, corpus.valid, corpus.test), num_tokens, strict=True):
        assert len(split.tokens) == count
        assert not np.any(split.tokens == corpus.vocabulary.unknown_id)
        np.testing.assert_array_equal(
            np.flatnonzero(split.tokens == corpus.vocabulary.eos_id)[:-1] + 1,
            split.line_starts[1:],
        )


MEASURE = """
import sys, time
from mogrifier_jax.data import corpora
start = time.process_time()
corpora.load_corpus("enwik8", source_dir=sys.argv[1], data_dir=sys.argv[2])
# The high-water mark of this program alone; `ru_maxrss` would count what its parent had.
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(time.process_time() - start, peak.split()[1])
"""


@pytest.mark.slow
@needs_corpora
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_enwik8_takes_seconds_and_less_than_a_gigabyte(tmp_path):
    seconds, kibibytes = map(float, finish(start_python(MEASURE, REAL, tmp_path)).split())
    assert seconds < 30 and kibibytes * 1024 < 1e9


def test_enwik8_is_cut_by_bytes(tmp_path, monkeypatch):
    content = bytes(range(1, 201))
    file = sources.File("enwik8", len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(
        enwik8.Enwik8, "SOURCE", dataclasses.replace(enwik8.Enwik8.SOURCE, files=(file,))
    )
    monkeypatch.setattr(enwik8, "_VALID", 180)
    monkeypatch.setattr(enwik8, "_TEST", 190)
    write(tmp_path / "files", {"enwik8.zip": make_zip({"enwik8": content})})
    corpus = corpora.load_corpus("enwik8", source_dir=tmp_path / "files")
    assert len(corpus.vocabulary) == 180 - 1 + 2  # All bytes but the newline, eos, <UNK>.
    assert corpus.unit == "byte" and len(corpus.valid.tokens) == 11


def test_a_folder_that_is_only_read_is_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv(files.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "text").write_text("some words\n" * 30)
    load = functools.partial(corpora.load_corpus, "text", path=str(tmp_path / "text"))
    expected = load(prepared_dir=str(tmp_path / "theirs"))
    assert not (tmp_path / "theirs").exists() and (tmp_path / "cache").is_dir()
    load(data_dir=str(tmp_path / "theirs"))  # Control: prepared there, it is read there.
    shutil.rmtree(tmp_path / "cache")
    found = load(prepared_dir=str(tmp_path / "theirs"))
    assert not (tmp_path / "cache").exists()
    assert found.train.tokens.tolist() == expected.train.tokens.tolist()


@pytest.mark.parametrize(
    "error", [RuntimeError("INTERNAL: no space"), OSError(28, "No space left"), ValueError("")]
)
def test_a_corpus_that_cannot_be_prepared_is_one_sentence(error, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("some words\n" * 30)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(base.TextBuilder, "download_and_prepare", fail)
    with pytest.raises(errors.UsageError, match=r"could not be prepared in .*; make room") as told:
        corpora.load_corpus("text", path=str(tmp_path / "text"), data_dir=str(tmp_path / "data"))
    assert "\n" not in str(told.value)


@pytest.fixture
def small_text8(monkeypatch):
    """The builder of text8 for 200 bytes, 180 of them for training, in lines of 7."""
    files = (sources.File("text8", 200),)
    monkeypatch.setattr(
        text8.Text8, "SOURCE", dataclasses.replace(text8.Text8.SOURCE, files=files, urls=())
    )
    for name, value in (("_VALID", 180), ("_TEST", 190), ("_LINE", 7)):
        monkeypatch.setattr(text8, name, value)


def test_text8_is_cut_into_splits_and_lines(small_text8, tmp_path):
    content = bytes(b"abcdefghijklmnopqrstuvwxyz "[i % 27] for i in range(200))
    write(tmp_path / "files", {"text8.zip": make_zip({"text8": content})})
    corpus = corpora.load_corpus("text8", source_dir=tmp_path / "files")
    assert len(corpus.vocabulary) == 29
    assert [len(getattr(corpus, s).tokens) for s in corpora.SPLITS] == [180 + 26, 12, 12]
    assert corpus.train.line_starts[:3].tolist() == [0, 8, 16]
    assert len(corpus.valid.line_starts) == 2
    read = "".join(corpus.vocabulary.decode(getattr(corpus, s).tokens) for s in corpora.SPLITS)
    assert read.replace("\n", "").encode() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * 199, "text8 has 199 bytes, not 200"),
        (b"a" * 150 + b"B" + b"a" * 49, "text8 has b'B' at byte 150, and must have only a to z"),
        (b"a" * 199 + b"\n", r"text8 has b'\\n' at byte 199"),
    ],
)
def test_an_unfit_text8_is_refused(small_text8, tmp_path, content, message):
    write(tmp_path / "files", {"text8": content})
    with pytest.raises(errors.UsageError, match=message):
        corpora.load_corpus("text8", source_dir=tmp_path / "files")
    assert not list((tmp_path / "cache").glob("text8/*"))
