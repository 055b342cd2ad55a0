"""Tables in Markdown of evaluated runs, with the numbers of the paper beside ours."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from ml_collections import config_dict

from mogrifier_jax import configs, files
from mogrifier_jax.evaluation import eval_options
from mogrifier_jax.training import units

SPLITS = ("valid", "test")
COLUMNS = ("valid", "test", "valid, dyneval", "test, dyneval")  # As the paper orders them.
# A row has a method and, in its last two columns, the same method with dynamic evaluation.
ADAPTED = {"deterministic": "dyneval", "mc": "mc_dyneval"}


def name_run(config: config_dict.ConfigDict, num_params: int) -> dict[str, str]:
    """Corpus, model and size of a run, as the paper's tables name them."""
    corpus = config.data.name
    if corpus == "mwc":
        corpus = f"mwc_{config.data.get('language') or 'en'}"
    # The budget is not used where the hidden size is set.
    solved = config.model.get("num_params") and not config.model.get("hidden_size")
    budget = config.model.num_params if solved else num_params
    # In millions, as in the paper; small models in thousands.
    params = f"{budget / 1e6:.0f}M" if budget >= 1e6 else f"{budget / 1e3:.0f}k"
    return {"corpus": corpus, "model": name_model(config), "params": params}


def name_model(config: config_dict.ConfigDict) -> str:
    """The name that the papers give to the model of a config."""
    cell, rounds = config.model.get("cell", "mogrifier_lstm"), config.model.get("rounds", 0)
    if cell == "mogrifier_lstm":
        return "mogrifier" if rounds else "lstm"
    if cell == "rewired_lstm":
        return "rlstm" if rounds == 0 else "mogrifier_rlstm"
    return cell


def paper_nats(run: Mapping[str, str], method: str) -> list[float | None]:
    """The paper's nats in the four columns; None where the paper has no number."""
    for row in configs.paper_numbers()["tables"].get(run["corpus"], {"rows": []})["rows"]:
        same = all(row.get(key) == run[key] for key in ("model", "params"))
        if same and row.get("evaluation") == method and "nats" in row:
            return row["nats"]
    return [None] * len(COLUMNS)


def to_markdown(evaluations: Sequence[files.JsonObject]) -> str:
    """One table for each corpus; an evaluation is the content of an evaluation.json."""
    sections = []
    head = ["model", "parameters", "evaluation", *COLUMNS, "run"]
    for corpus in dict.fromkeys(e["run"]["corpus"] for e in evaluations):
        chosen = [e for e in evaluations if e["run"]["corpus"] == corpus]
        rows = [row for evaluation in chosen for row in make_rows(evaluation)]
        sections += [
            f"## {corpus}, {units.UNITS[chosen[0]['unit']]}",
            "Our score comes first. In parentheses are the paper's score and the difference.",
            markdown_table(head, rows, right=range(3, 3 + len(COLUMNS))),
        ]
    return "\n\n".join(sections) + "\n"


def markdown_table(
    head: Sequence[object], rows: Sequence[Sequence[object]], right: Collection[int] = ()
) -> str:
    """A table in Markdown; the columns in `right`, counted from 0, are aligned to the right."""
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


def make_rows(evaluation: files.JsonObject) -> Iterator[list[str]]:
    """The rows of a run, one for each method that is not the adapted form of another."""
    run, unit = evaluation["run"], evaluation["unit"]
    ours = {(result["method"], result["text"]): result for result in evaluation["results"]}
    workdir = f"`{evaluation['workdir']}`, step {evaluation['step']:,}"
    if not evaluation["finished"]:
        workdir += ", not ended"
    for method in (method for method in eval_options.METHODS if method not in ADAPTED.values()):
        both = (method, ADAPTED.get(method))
        if any(name in both for name, _ in ours):
            results = [ours.get((name, split)) for name in both for split in SPLITS]
            pairs = zip(results, paper_nats(run, method), strict=True)
            cells = [_format_cell(result, paper, unit) for result, paper in pairs]
            yield [run["model"], run["params"], method, *cells, workdir]


def _format_cell(result: files.JsonObject | None, paper: float | None, unit: str) -> str:
    theirs = "" if paper is None else units.number(paper, unit)
    if result is None or result["nats"] is None:
        ours = "–" if result is None else "diverged"
        return f"{ours} ({theirs})" if theirs else ours
    ours = units.number(result["nats"], unit)
    if paper is None:
        return ours
    difference = units.in_unit(result["nats"], unit) - units.in_unit(paper, unit)
    sign = "−" if difference < 0 else "+"
    return f"{ours} ({theirs}, {sign}{abs(difference):.{units.digits(unit)}f})"
