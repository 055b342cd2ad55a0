r"""Multilingual Wikipedia Corpus, character level, English or Finnish: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/mwc.py --workdir=runs/mwc_en
    python -m mogrifier_jax.main --config=experiments/mwc.py:lstm,fi --workdir=runs/mwc_fi_lstm

Paper, bits per character on valid / test:

                  deterministic   + dyneval       MC dropout      + dyneval
    en LSTM       1.353 / 1.338   1.239 / 1.225   1.347 / 1.332   1.238 / diverged
    en Mogrifier  1.320 / 1.305   1.202 / 1.189   1.313 / 1.298   1.200 / 1.187
    fi LSTM       1.383 / 1.367   1.249 / 1.237   1.377 / 1.361   1.247 / 1.234
    fi Mogrifier  1.339 / 1.326   1.202 / 1.192   1.327 / 1.314   1.198 / diverged

Measured: not yet.

Variants: `mogrifier` (default) or `lstm`; `en` (default) or `fi`; `tiny` is a smoke run.
"""

from mogrifier_jax import configs

COMMON = dict(
    data=dict(name="mwc", batch_size=64, window=150),
    # The published program redraws the mask of the state at each step here.
    model=dict(num_params=24_000_000, state_mask="step"),
    averaging=dict(trigger_turns=25, trigger_at_the_latest=400),
    schedule=dict(turns=500, steps_per_turn=200),
)
# For each key the values of the Mogrifier and of the LSTM.
TUNED = {
    "en": {
        "model.rounds": (6, 0),
        "model.rank": (78, 0),
        "model.embedding_ratio": (0.48783057795681084, 0.16763290107221795),
        "dropout.input": (0.22379479910762798, 0.24803406411000273),
        "dropout.inter_layer": (0.08779703173530118, 0.04740148103981923),
        "dropout.state": (0.09548532162445378, 0.046954638037220955),
        "dropout.output": (0.005212299871888891, 0.06200886700243824),
        "optimizer.learning_rate": (0.0014344414472614946, 0.0038051220647221428),
        "optimizer.l2_penalty": (9.245434142118616e-05, 7.825277510671981e-06),
    },
    "fi": {
        "model.rounds": (5, 0),
        "model.rank": (100, 0),
        "model.embedding_ratio": (1.3016032871831578, 1.5665444454253725),
        "dropout.input": (0.06995541397794428, 0.0004278254540998817),
        "dropout.inter_layer": (0.11571939622760244, 0.03679207573249842),
        "dropout.state": (0.1759160317735942, 0.15784488790163897),
        "dropout.output": (0.22149685667402097, 0.21672999424789158),
        "optimizer.learning_rate": (0.001999992683987708, 0.0038728221226125496),
        "optimizer.l2_penalty": (9.607977185924193e-05, 3.35903544036833e-05),
    },
}


def get_config(variant=""):
    cell, language, size = configs.choose(
        variant, ("mogrifier", "lstm"), ("en", "fi"), ("", "tiny")
    )
    chosen = {"data.language": language}
    tuned = {name: values[cell == "lstm"] for name, values in TUNED[language].items()}
    sizes = {"": {}, "tiny": configs.TINY}
    return configs.base(configs.LAMB, COMMON, chosen, tuned, sizes[size])
