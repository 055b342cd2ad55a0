"""Tables in Markdown, with the numbers of the paper beside ours."""

import numpy as np

from experiments import pydoc
from mogrifier_jax.evaluation import eval_options, evaluate_command, paper_tables
from mogrifier_jax.training import workdirs


def fake_evaluation(name, corpus, model, params, unit, rows):
    results = [{"method": m, "text": t, "nats": nats, "tokens": 5} for (m, t), nats in rows.items()]
    return {
        **{"workdir": name, "step": 9, "finished": True, "unit": unit, "results": results},
        "which": "best",
        "run": {"corpus": corpus, "model": model, "params": params},
    }


def test_markdown_sets_our_numbers_beside_the_papers(tmp_path, capsys):
    ours = fake_evaluation(
        *("a", "ptb", "mogrifier", "24M", "ppl"),
        {("deterministic", "test"): 3.93124 + np.log(1.1), ("mc_dyneval", "valid"): 3.8042},
    )
    own = fake_evaluation("b", "pydoc", "lstm", "500k", "bpc", {("deterministic", "valid"): 1.5})
    for evaluation in (ours, own):
        (tmp_path / evaluation["workdir"]).mkdir()
        workdirs.write_json(tmp_path / evaluation["workdir"], "evaluation.json", evaluation)
    folders = [str(tmp_path / name) for name in "ab"]
    output = tmp_path / "RESULTS.md"
    options = eval_options.defaults()
    with options.unlocked():
        options.update(methods="", output=str(output))
    evaluate_command.evaluate_workdirs(folders, options)
    markdown = output.read_text()
    assert markdown.strip() == capsys.readouterr().out.strip()
    perplexity = np.exp(3.93124)
    assert f"{1.1 * perplexity:.2f} ({perplexity:.2f}, +{0.1 * perplexity:.2f})" in markdown
    assert f"{np.exp(3.8042):.2f} ({np.exp(3.8042):.2f}, +0.00)" in markdown
    assert f"| – ({np.exp(3.95346):.2f}) |" in markdown  # Not measured by us.
    assert "## pydoc, bits per character" in markdown and f"| {1.5 / np.log(2):.4f} |" in markdown


def test_a_method_that_the_paper_lacks_has_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr(eval_options, "METHODS", (*eval_options.METHODS, "new"))
    nats = {("deterministic", "test"): 1.0, ("dyneval", "test"): 2.0, ("new", "test"): 3.0}
    evaluation = fake_evaluation("a", "ptb", "lstm", "1k", "nats", nats)
    first, second = (row[2:-1] for row in paper_tables.make_rows(evaluation))
    assert first == ["deterministic", "–", "1.0000", "–", "2.0000"]
    assert second == ["new", "–", "3.0000", "–", "–"]


def test_runs_are_found_in_the_papers_tables():
    config = pydoc.get_config()
    with config.unlocked():
        config.data.name = "enwik8"
        config.model.num_params = 48_000_000
    run = paper_tables.name_run(config, 1)
    assert paper_tables.paper_nats(run, "deterministic") == [0.78663, 0.79413, 0.71751, 0.70177]
    assert paper_tables.paper_nats({**run, "params": "24M"}, "deterministic") == [None] * 4
