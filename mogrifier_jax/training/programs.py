"""The jitted programs of a run, with shardings: its steps, its averages and its evaluation.

`runs.py` says what a run is made of, and `train.py` calls these programs. Preflight compiles the
same steps for chips that are not here.
"""

import jax

from mogrifier_jax import partitioning
from mogrifier_jax.training import evaluate, runs, steps


class Programs:
    """What a run compiles; runs that differ only in numbers that are traced may share it."""

    def __init__(self, run: runs.Run):
        average = run.program.average
        shardings = shardings_of(run.abstract_state())
        self.init = jax.jit(run.init_state, out_shardings=shardings)
        self.train_steps = jit_train_steps(run)
        self.candidates = jax.jit(average.candidates)
        self.is_averaged = jax.jit(average.is_on)
        self.best_weights = jax.jit(average.value)
        # An average that changed its sharding would have the train step compiled again.
        self.after_evaluation = jax.jit(average.after_evaluation, out_shardings=shardings.average)
        self.start_averaging = jax.jit(average.start, out_shardings=shardings.average)
        self.evaluate = make_turn_evaluation(run)


def jit_train_steps(run: runs.Run) -> jax.stages.Wrapped:
    """(state, stream, hyper, num_steps=...) to (state, metrics [S]), as training compiles it."""
    shardings = shardings_of(run.abstract_state())

    def train_steps(state, stream, hyper, num_steps):
        # The recurrence asks for the mesh: how many rows a device has decides how it runs.
        with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
            return steps.train_steps(state, stream, hyper, program=run.program, num_steps=num_steps)

    return jax.jit(
        train_steps,
        static_argnames="num_steps",
        donate_argnames="state",
        out_shardings=(shardings, partitioning.replicated(run.mesh)),
    )


def make_turn_evaluation(run: runs.Run) -> evaluate.TurnEvaluation:
    """The evaluation before each turn; its stripes are those of one group of a batch."""
    return evaluate.TurnEvaluation(
        run.model,
        run.task,
        run.config.evaluation,
        batch_size=run.batch_size // run.program.accumulate,
        window=run.config.data.window,
    )


def shardings_of(tree):
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
