"""`--mode=evaluate`: every column of the paper's tables for the runs in workdirs.

    python -m mogrifier_jax.main --mode=evaluate --workdir=runs/ptb --eval.methods=deterministic,mc

Results are added to `evaluation.json` in the workdir, and the score of every token goes to
`tokens/<method>_<split>.npz`, or `tokens/<method>_text_<name>_<digest of its path>.npz` for
`--eval.text`. Several workdirs make a table in Markdown, with the paper's numbers
beside theirs. `methods.py` lists the options and does the scoring.

A file of tokens is a compressed .npz with the arrays `tokens` [N] int32 and `nats` [N] float32, in
the order of the text, and `about`, a JSON text with the digest of the vocabulary. Several such
files make an ensemble.
"""

import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import configs, errors, files
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import dyneval, eval_options, methods
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate, summaries, units, workdirs

EVALUATION = {  # Of evaluation.json.
    **dict.fromkeys(("workdir", "which"), str),
    "step": files.COUNT,
    "unit": tuple(units.UNITS),
    "finished": bool,
    "run": {"corpus": str, "model": str, "params": str},
    "results": [
        {
            "method": str,
            "text": str,
            "nats": (files.Number(float), None),
            "tokens": files.COUNT,
            "last_finite_nats?": float,
            "source?": str,
        }
    ],
}
# Of a file of tokens.
TOKENS = {"tokens": files.Array("iu", 1), "nats": files.Array("f", 1), "about": files.Array("U", 0)}
# Keys of a result that `describe` shows elsewhere, or not at all.
_SHOWN = ("method", "text", "nats", "tokens", "seconds", "file", "perplexity", "bits")


def run(folders: Sequence[str], options: config_dict.ConfigDict) -> list[dict[str, Any]]:
    """Evaluates the runs in these workdirs, or averages files of tokens; returns the results."""
    eval_options.check(options)
    if options.ensemble:
        return [run_ensemble(options.ensemble.split(","), options.output)]
    if not folders or not all(folders):
        raise errors.UsageError("--workdir is missing; give that of a run, or several: a,b,c")
    for folder in folders:
        if pathlib.Path(folder).is_file():
            raise errors.UsageError(f"{folder} is a file; results need the workdir of a run")
    if options.methods:
        for folder in folders:
            workdirs.check_results(folder, "evaluation.json", "tokens/x", "dyneval/x")
    evaluations = [evaluate_workdir(folder, options) for folder in folders]
    if len(folders) > 1 or options.output:
        markdown = to_markdown(evaluations)
        if jax.process_index() == 0:
            print(markdown)
            if options.output:
                workdirs.replace_text(pathlib.Path(options.output), markdown)
    return evaluations


def run_ensemble(paths: Sequence[str], output: str | None = None) -> dict[str, Any]:
    """Averages the probabilities in files of token scores and shows the score of the average."""
    scores, members, vocab = ensemble(paths)
    nats = scores.mean()
    rows = [(str(path), _show_nats(member)) for path, member in zip(paths, members, strict=True)]
    rows.append(("ensemble", _show_nats(nats)))
    logging.info("\n%s", summaries.table({f"ensemble of {len(paths)} files": rows}))
    if output:
        write_tokens(output, scores, vocab, ensemble=list(map(str, paths)))
    return {"ensemble": list(map(str, paths)), "nats": nats, "members": members}


def evaluate_workdir(folder: str, options: config_dict.ConfigDict) -> dict[str, Any]:
    """Runs the methods that are asked for on one workdir; returns its evaluation.json."""
    names = [name for name in options.methods.split(",") if name]
    for name in names:
        if name not in methods.METHODS:
            known = ", ".join(methods.METHODS)
            raise errors.UsageError(f"method {name!r} is unknown; use any of {known}")
    if not names:
        return read_evaluation(folder)
    scorer = methods.Scorer(folder, options)
    evaluation = begin(scorer)
    for method in names:
        details, score = getattr(scorer, method)()
        for name in scorer.names:
            started = time.perf_counter()
            row = make_row(scorer, method, name, details, score(name))
            row["seconds"] = round(time.perf_counter() - started, 2)
            # Each result is kept at once, so an interruption loses only the one that is computed.
            if jax.process_index() == 0:
                keep_row(folder, evaluation, row)
    logging.info("\n%s", describe(evaluation))
    return evaluation


def begin(scorer: methods.Scorer) -> dict[str, Any]:
    """The content of evaluation.json to begin with; earlier results of the weights are in it."""
    info = scorer.loaded.info
    num_params = sum(models.count_parameters(scorer.model).values())
    evaluation = {
        **{key: info[key] for key in ("workdir", "which", "step", "total_steps", "finished")},
        "unit": scorer.texts.unit,
        "run": describe_run(scorer.loaded.config, num_params),
        "num_params": num_params,
        "versions": workdirs.versions(),
        "results": [],
    }
    take_earlier(scorer.folder, evaluation)
    return evaluation


def take_earlier(folder: str, evaluation: dict[str, Any]) -> None:
    """Takes over results in the workdir that are of the same weights."""
    if (pathlib.Path(folder) / "evaluation.json").exists():
        earlier = read_evaluation(folder)
        if all(earlier.get(key) == evaluation[key] for key in ("which", "step", "unit")):
            evaluation["results"] = earlier["results"]


def keep_row(folder: str, evaluation: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Adds a result to evaluation.json; other processes may add theirs at the same time."""
    with workdirs.locked(folder):
        take_earlier(folder, evaluation)
        same = ("method", "text", "source")  # The new result replaces such an earlier one.
        evaluation["results"] = [
            *(r for r in evaluation["results"] if any(r.get(k) != row.get(k) for k in same)),
            row,
        ]
        workdirs.write_json(folder, "evaluation.json", evaluation)


def make_row(scorer, method, name, details, result) -> dict[str, Any]:
    """One result for evaluation.json, with null nats if it diverged; writes its file of tokens."""
    row = {"method": method, "text": name, "stripes": scorer.options.stripes, **details}
    if name == "text" or "changed_splits" in scorer.texts.about:
        row |= scorer.texts.about
    if name == "text":
        # Files of the same name in two folders are two texts.
        place = os.path.abspath(scorer.options.text)
        digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
        name = f"text_{pathlib.Path(place).stem[:40]}_{digest}"
    scores = result
    if isinstance(result, dyneval.Outcome):
        scores = result.scores
        if result.diverged_at is not None:
            logging.warning("%s of %s %s", method, name, methods.show_outcome(result))
            row |= {"diverged_at_window": result.diverged_at}
            row |= {"last_finite_nats": scores.mean()}
    path = pathlib.Path(scorer.folder) / "tokens" / f"{method}_{name}.npz"
    if jax.process_index() == 0:
        write_tokens(path, scores, scorer.loaded.vocabulary, **row)
    nats = result.mean()
    if nats != nats:
        return row | {"nats": None, "tokens": len(scores.tokens), "file": str(path)}
    values = {"perplexity": units.perplexity(nats), "bits": units.bits(nats)}
    return row | {"nats": nats, **values, "tokens": len(scores.tokens), "file": str(path)}


def read_evaluation(folder: str) -> dict[str, Any]:
    """The content of evaluation.json in a workdir."""
    path = pathlib.Path(folder) / "evaluation.json"
    if not path.exists():
        raise errors.UsageError(
            f"{path} does not exist; evaluate that run first, with --eval.methods"
        )
    return files.read_json(path, EVALUATION, "delete it and evaluate again")


def describe(evaluation: Mapping[str, Any]) -> str:
    """The table on the terminal: the scores of each method, then the options it used."""
    sections: dict[str, list[tuple[str, Any]]] = {
        "run": [
            ("workdir", evaluation["workdir"]),
            ("checkpoint", f"{evaluation['which']}, step {evaluation['step']:,}"),
            *evaluation["run"].items(),
        ]
    }
    unit = evaluation["unit"]
    for method in methods.METHODS:
        rows = [row for row in evaluation["results"] if row["method"] == method]
        if not rows:
            continue
        lines: list[tuple[str, Any]] = []
        for row in rows:
            score = "diverged" if row["nats"] is None else units.show(row["nats"], unit)
            nats = row["nats"] if row["nats"] is not None else row.get("last_finite_nats", math.nan)
            lines.append((row["text"], f"{score}  ({nats:.5f} nats, {row['tokens']:,} tokens)"))
        details = {k: v for row in rows for k, v in row.items() if k not in _SHOWN}
        sections[method] = lines + [(f"  {key}", value) for key, value in details.items()]
    return summaries.table(sections)


def _show_nats(nats: float) -> str:
    return f"{nats:.5f} nats  (ppl {units.perplexity(nats):.2f}, {units.bits(nats):.4f} bits)"


# The columns of the paper's tables in their order, and which methods fill the last two of a row.
SPLITS = ("valid", "test")
COLUMNS = ("valid", "test", "valid, dyneval", "test, dyneval")
ADAPTED = {"deterministic": "dyneval", "mc": "mc_dyneval"}


def describe_run(config: config_dict.ConfigDict, num_params: int) -> dict[str, str]:
    """Corpus, model and size of a run, as the paper's tables name them."""
    corpus = config.data.name
    if corpus == "mwc":
        corpus = f"mwc_{config.data.get('language') or 'en'}"
    # A model whose hidden size is set does not use the budget.
    solved = config.model.get("num_params") and not config.model.get("hidden_size")
    budget = config.model.num_params if solved else num_params
    # As the paper writes it; small models are named by their thousands.
    params = f"{budget / 1e6:.0f}M" if budget >= 1e6 else f"{budget / 1e3:.0f}k"
    return {"corpus": corpus, "model": name_model(config), "params": params}


def name_model(config: config_dict.ConfigDict) -> str:
    """The papers' name for the model of a config."""
    cell, rounds = config.model.get("cell", "mogrifier_lstm"), config.model.get("rounds", 0)
    if cell == "mogrifier_lstm":
        return "mogrifier" if rounds else "lstm"
    if cell == "rewired_lstm":
        return "rlstm" if rounds == 0 else "mogrifier_rlstm"
    return cell


def paper_nats(run: Mapping[str, str], kind: str) -> list[float | None]:
    """The paper's nats in the four columns; None where the paper has no number."""
    for row in configs.paper_numbers()["tables"].get(run["corpus"], {"rows": []})["rows"]:
        same = all(row.get(key) == run[key] for key in ("model", "params"))
        if same and row.get("evaluation") == kind and "nats" in row:
            return row["nats"]
    return [None] * len(COLUMNS)


def to_markdown(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """One table for each corpus; each evaluation is the content of an evaluation.json."""
    sections = []
    head = ["model", "parameters", "evaluation", *COLUMNS, "run"]
    for corpus in dict.fromkeys(e["run"]["corpus"] for e in evaluations):
        chosen = [e for e in evaluations if e["run"]["corpus"] == corpus]
        rows = [row for evaluation in chosen for row in _rows(evaluation)]
        sections += [
            f"## {corpus}, {units.UNITS[chosen[0]['unit']]}",
            "Our score comes first. In parentheses are the paper's score and the difference.",
            markdown_table(head, rows, right=range(3, 3 + len(COLUMNS))),
        ]
    return "\n\n".join(sections) + "\n"


def markdown_table(
    head: Sequence[Any], rows: Sequence[Sequence[Any]], right: Collection[int] = ()
) -> str:
    """A table in Markdown; the columns in `right`, counted from 0, are aligned to the right."""
    rule = ["---:" if place in right else "---" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


def _rows(evaluation: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row of the table for each kind of evaluation that a run has."""
    run, unit = evaluation["run"], evaluation["unit"]
    ours = {(row["method"], row["text"]): row for row in evaluation["results"]}
    workdir = f"`{evaluation['workdir']}`, step {evaluation['step']:,}"
    if not evaluation["finished"]:
        workdir += ", not ended"
    for kind in (method for method in methods.METHODS if method not in ADAPTED.values()):
        names = (kind, ADAPTED.get(kind))
        if any(method in names for method, _ in ours):
            found = [ours.get((method, split)) for method in names for split in SPLITS]
            both = zip(found, paper_nats(run, kind), strict=True)
            cells = [_cell(row, paper, unit) for row, paper in both]
            yield [run["model"], run["params"], kind, *cells, workdir]


def _cell(row: Mapping[str, Any] | None, paper: float | None, unit: str) -> str:
    theirs = "" if paper is None else units.number(paper, unit)
    if row is None or row["nats"] is None:
        ours = "–" if row is None else "diverged"
        return f"{ours} ({theirs})" if theirs else ours
    ours = units.number(row["nats"], unit)
    if paper is None:
        return ours
    difference = units.in_unit(row["nats"], unit) - units.in_unit(paper, unit)
    sign = "−" if difference < 0 else "+"
    return f"{ours} ({theirs}, {sign}{abs(difference):.{units.digits(unit)}f})"


def write_tokens(
    path: str | os.PathLike,
    scores: evaluate.TokenScores,
    vocab: corpora.Vocabulary | str,
    **about: Any,
) -> None:
    """Writes a file of tokens, whole or not at all; `vocab` may be the digest of a vocabulary."""
    digest = vocab if isinstance(vocab, str) else digest_vocabulary(vocab)
    with workdirs.replacing(path) as file:
        np.savez_compressed(
            file,
            tokens=scores.tokens.astype(np.int32),
            nats=scores.nats.astype(np.float32),
            about=np.array(json.dumps({"vocabulary": digest, **about})),
        )


def read_tokens(path: str | os.PathLike) -> tuple[evaluate.TokenScores, dict[str, Any]]:
    """The scores in a file of tokens, and its `about`."""
    remedy = "give .npz files that --mode=evaluate has written"
    arrays = files.read_arrays(path, TOKENS, remedy)
    about = files.parse_json(str(arrays["about"]), {"vocabulary": str}, f"{path}: about", remedy)
    scores = evaluate.TokenScores(arrays["tokens"], arrays["nats"])
    if len(scores.tokens) != len(scores.nats) or not len(scores.nats):
        raise errors.UsageError(
            f"{path} has {len(scores.tokens):,} tokens and {len(scores.nats):,} nats, not one for "
            f"each; {remedy}"
        )
    return scores, about


def ensemble(paths: Sequence[str | os.PathLike]) -> tuple[evaluate.TokenScores, list[float], str]:
    """Averages the probabilities of each token.

    It also returns the nats of each file, and the digest of the vocabulary. It refuses files that
    differ in their tokens or in their vocabulary.
    """
    if len(paths) < 2:
        raise errors.UsageError(f"{len(paths)} files make no ensemble; give two or more")
    (first, about), *others = (read_tokens(path) for path in paths)
    log_p = -first.nats.astype(np.float64)
    means = [first.mean()]
    for path, (scores, described) in zip(paths[1:], others, strict=True):
        if described["vocabulary"] != about["vocabulary"]:
            _refuse(paths[0], path, "their vocabularies differ")
        if len(scores.tokens) != len(first.tokens):
            _refuse(paths[0], path, f"{len(first.tokens):,} and {len(scores.tokens):,} tokens")
        different = np.flatnonzero(scores.tokens != first.tokens)
        if len(different):
            _refuse(paths[0], path, f"they differ first at token {different[0]:,}")
        log_p = np.logaddexp(log_p, -scores.nats.astype(np.float64))
        means.append(scores.mean())
    nats = np.log(len(paths)) - log_p
    return evaluate.TokenScores(first.tokens, nats.astype(np.float32)), means, about["vocabulary"]


def digest_vocabulary(vocab: corpora.Vocabulary) -> str:
    """SHA-256 of a vocabulary; files with different digests cannot be compared."""
    return hashlib.sha256(vocab.to_json().encode()).hexdigest()


def _refuse(first, second, why: str) -> None:
    raise errors.UsageError(
        f"{first} and {second} score different texts: {why}; an ensemble needs files of the same "
        "split, made with the same vocabulary"
    )
