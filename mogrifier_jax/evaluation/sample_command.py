"""`--mode=sample`: prints text that a trained run generates."""

import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.evaluation import text_sampling, trained_model


def print_samples(
    workdir: str, sampling: text_sampling.Sampling, prompt: str | None = None
) -> None:
    """Prints one sample while it is drawn, or several samples one after another."""
    sampling.check()
    if not workdir:
        raise errors.UsageError("--workdir is missing; give the workdir of a trained run")
    model = trained_model.load(workdir)
    drawn = model.draw(sampling, prompt)
    prompt_ids = text_sampling.encode_prompt(model.vocabulary, prompt)
    if sampling.num_samples == 1:
        for piece in text_sampling.decode_pieces(model.vocabulary, prompt_ids, drawn):
            print(piece, end="", flush=True)
        print()
        return
    for index, ids in enumerate(np.concatenate(list(drawn), axis=1)):
        print(f"--- sample {index + 1}")
        print(*text_sampling.decode_pieces(model.vocabulary, prompt_ids, [ids[None]]))
