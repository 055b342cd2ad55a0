r"""Reverse copy (section 4.3 of the paper): read random words, then repeat them backwards.

    python -m mogrifier_jax.main --mode=sweep --config=experiments/reverse_copy.py \
        --set=10m_1k --workdir=runs/reverse_copy

An encoder and a decoder of one layer each; the decoder starts from the encoder's last state.
Paper, nats per token on validation data (10M parameters and 1k words, 24M and 10k):

    length               50        100       150       200
    10M  LSTM            0.00020   0.05715   0.62399   1.80348
    10M  Mogrifier       0.00038   0.07821   0.27998   1.39342
    24M  LSTM            0.14      0.25      1.49      3.99
    24M  Mogrifier       0.03      0.13      0.29      1.03

The paper tunes learning rate, L2 penalty and embedding size for each model and length (and rounds
and rank). It gives the sizes of the best trials at lengths 150 and 200, which determine the ratio
of embedding to hidden size here; shorter lengths have the ratio of 150. The other values are ours.

Variants: a model, `mogrifier` or `lstm`; a length; a size, `10m` (default) or `24m`. `small` (500
words, 300k parameters, both models with the same ratio) takes a minute or two on a CPU; `tiny` is a
smoke run. Sets: `10m_1k`, `24m_10k`, `small`, `tiny`. Measured numbers are in RESULTS.md.
"""

from mogrifier_jax import configs
from mogrifier_jax.configs import Row, Set

LENGTHS = (50, 100, 150, 200)
SMALL_LENGTHS = (5, 10, 15, 20)
RATIOS = {  # Embedding size over hidden size of the paper's best trials: up to 150, and at 200.
    "mogrifier": (41 / 1054, 181 / 961),
    "lstm": (498 / 787, 493 / 790),
}
SIZES = {
    "10m": {},
    "24m": dict(data=dict(vocab_size=10_000), model=dict(num_params=24_000_000)),
    "small": dict(
        data=dict(vocab_size=500, batch_size=32, num_valid=1_000, num_test=1_000),
        model=dict(num_params=300_000, embedding_ratio=0.5, rank=16),
        optimizer=dict(learning_rate=0.004),
        schedule=dict(turns=4, steps_per_turn=300),
        averaging=dict(trigger_turns=4, trigger_at_the_latest=3),
        evaluation=dict(train_windows=1, softmax_temperature=1.0),
    ),
    "tiny": dict(
        data=dict(vocab_size=8, batch_size=8, num_train=64, num_valid=16, num_test=16),
        model=dict(hidden_size=8, embedding_ratio=0.5, rank=2),
        schedule=dict(turns=2, steps_per_turn=4),
        averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
        evaluation=dict(train_windows=1, softmax_temperature=1.0),
    ),
}


def get_config(variant=""):
    lengths = [f"length{length}" for length in (150, 50, 100, 200, *SMALL_LENGTHS)]
    cell, length, size = configs.choose(variant, ("mogrifier", "lstm"), lengths, SIZES)
    length = int(length.removeprefix("length"))
    common = dict(
        log_every=50,
        data=dict(
            name="reverse_copy",
            length=length,
            vocab_size=1_000,
            num_train=500_000,
            num_valid=10_000,
            num_test=10_000,
            batch_size=64,
            window=length + 1,  # The words and their end.
        ),
        model=dict(
            num_layers=1,
            num_params=10_000_000,
            embedding_ratio=RATIOS[cell][length > 150],
            rounds=5,
            rank=40,
            state_mask="step",
        ),
        optimizer=dict(learning_rate=0.002, l2_penalty=5e-6, accumulate_reduce="sum"),
        averaging=dict(trigger_turns=10, trigger_at_the_latest=80),
        schedule=dict(turns=100, steps_per_turn=200),
    )
    return configs.base(common, SIZES[size], configs.UNGATED if cell == "lstm" else {})


def compare(lengths, paper=None):
    """Both models over the lengths; nats, as the paper shows them."""
    rows = []
    for cell, label in (("lstm", "LSTM"), ("mogrifier", "Mogrifier")):
        published = dict(paper[cell]) if paper else {}
        rows += [Row(f"{cell},length{n}", label, n, published.get(n)) for n in lengths]
    return Set("Reverse copy", rows, x_label="sequence length", unit="nats")


PAPER = configs.paper_numbers()["reverse_copy"]
SETS = {
    "10m_1k": compare(LENGTHS, PAPER["10m_1k"]),
    "24m_10k": compare(LENGTHS, PAPER["24m_10k"]),  # With --config=experiments/reverse_copy.py:24m.
    "small": compare(SMALL_LENGTHS),
    "tiny": compare(SMALL_LENGTHS[:2]),
}
