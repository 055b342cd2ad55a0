"""`--mode=evaluate`: every column of the paper's tables for the runs in workdirs.

    python -m mogrifier_jax.main --mode=evaluate --workdir=runs/ptb --eval.methods=deterministic,mc

Results are added to `evaluation.json` in the workdir (`evaluation_json.py`). The score of every
token is written to `tokens/<method>_<split>.npz`, or, for `--eval.text`, to
`tokens/<method>_text_<name>_<digest of its path>.npz` (`token_files.py`). Several workdirs make a
table in Markdown (`paper_tables.py`). `methods.py` does the scoring, and `eval_options.py` lists
the options.
"""

import hashlib
import math
import os
import pathlib
import time
from collections.abc import Sequence

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import buckets, errors, files
from mogrifier_jax.evaluation import (
    dyneval,
    ensembles,
    eval_options,
    evaluation_json,
    methods,
    paper_tables,
    token_files,
)
from mogrifier_jax.training import atomic_files, scoring, units, workdirs


def evaluate_workdirs(
    folders: Sequence[str], options: config_dict.ConfigDict
) -> list[files.JsonObject]:
    """Evaluates the runs in these workdirs, or averages token files; returns the results."""
    eval_options.check(options)
    if options.ensemble:
        return [ensembles.evaluate_ensemble(options.ensemble.split(","), options.output)]
    if not folders or not all(folders):
        raise errors.UsageError(
            "--workdir is missing; give the workdir of a run, or several: a,b,c"
        )
    for folder in folders:
        if pathlib.Path(folder).is_file():
            raise errors.UsageError(f"{folder} is a file; results need the workdir of a run")
    if options.methods:
        for folder in folders:
            workdirs.check_results(folder, evaluation_json.FILE, "tokens/x", "dyneval/x")
    evaluations = [evaluate_workdir(folder, options) for folder in folders]
    if len(folders) > 1 or options.output:
        markdown = paper_tables.to_markdown(evaluations)
        if jax.process_index() == 0:
            print(markdown)
            if options.output:
                atomic_files.write_output(pathlib.Path(options.output), markdown)
    return evaluations


def evaluate_workdir(folder: str, options: config_dict.ConfigDict) -> files.JsonObject:
    """Scores the run in one workdir by the chosen methods; returns its evaluation.json."""
    names = [name for name in options.methods.split(",") if name]
    for name in names:
        if name not in eval_options.METHODS:
            known = ", ".join(eval_options.METHODS)
            raise errors.UsageError(f"method {name!r} is unknown; use any of {known}")
    if not names:
        return evaluation_json.read_evaluation(folder)
    scorer = methods.Scorer(folder, options)
    evaluation = evaluation_json.start_evaluation(scorer)
    for method in names:
        details, score = getattr(scorer, method)()
        for text in scorer.names:
            started = time.perf_counter()
            result = make_result(scorer, method, text, details, score(text))
            result["seconds"] = round(time.perf_counter() - started, 2)
            # Saved at once, so that an interruption loses only the result being computed.
            if jax.process_index() == 0:
                evaluation_json.add_result(folder, evaluation, result)
    logging.info("\n%s", evaluation_json.format_table(evaluation))
    return evaluation


def make_result(
    scorer: methods.Scorer,
    method: str,
    text: str,
    details: files.JsonObject,
    outcome: scoring.TokenScores | dyneval.Outcome,
) -> files.JsonObject:
    """One result for evaluation.json; its token file is written.

    The nats of a result that diverged are None, and those before the divergence are kept.
    """
    result = {"method": method, "text": text, "stripes": scorer.options.stripes, **details}
    if text == "text" or "changed_splits" in scorer.origin:
        result |= scorer.origin
    name = text
    if text == "text":
        # The digest tells apart files of the same name in different folders.
        path = os.path.abspath(scorer.options.text)
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        name = f"text_{pathlib.Path(path).stem[:40]}_{digest}"
    scores = outcome.scores if isinstance(outcome, dyneval.Outcome) else outcome
    if isinstance(outcome, dyneval.Outcome) and outcome.diverged_at is not None:
        logging.warning("%s of %s %s", method, name, methods.format_outcome(outcome))
        result["diverged_at_window"] = outcome.diverged_at
        result["last_finite_nats"] = scores.mean()
    token_file = pathlib.Path(scorer.folder) / "tokens" / f"{method}_{name}.npz"
    if jax.process_index() == 0:
        token_files.write_tokens(token_file, scores, scorer.loaded.vocabulary, **result)
    saved = {"tokens": len(scores.tokens), "file": buckets.show(str(token_file))}
    nats = outcome.mean()
    if math.isnan(nats):
        return result | {"nats": None, **saved}
    values = {"perplexity": units.perplexity(nats), "bits": units.bits(nats)}
    return result | {"nats": nats, **values, **saved}
