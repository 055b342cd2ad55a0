"""The jitted programs of a run, with their shardings: steps, averages and evaluation.

`runs.py` makes a run, and `train.py` calls these programs. Preflight compiles the same steps for
chips that this machine does not have.
"""

import jax
from jaxtyping import PyTree

from mogrifier_jax import partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.training import runs, steps, turn_evaluation


class Programs:
    """What a run compiles; runs that differ only in traced numbers can share it."""

    def __init__(self, run: runs.Run):
        average = run.program.average
        shardings = shardings_of(run.abstract_state())
        self.init = jax.jit(run.init_state, out_shardings=shardings)
        self.train_steps = jit_train_steps(run)
        self.candidates = jax.jit(average.candidates)
        self.is_averaged = jax.jit(average.is_on)
        self.best_weights = jax.jit(average.value)
        # If these changed the sharding of the average, the train step would be compiled again.
        self.after_evaluation = jax.jit(average.after_evaluation, out_shardings=shardings.average)
        self.start_averaging = jax.jit(average.start, out_shardings=shardings.average)
        self.evaluate = make_turn_evaluation(run)


def jit_train_steps(run: runs.Run) -> jax.stages.Wrapped:
    """Returns the jitted train steps.

    `f(state, stream, hyper, num_steps=S)` returns the new state and the metrics [S] of S steps.
    """
    shardings = shardings_of(run.abstract_state())

    def train_steps(
        state: steps.TrainState, stream: tasks.Stream, hyper: steps.Hyperparameters, num_steps: int
    ) -> tuple[steps.TrainState, dict[str, jax.Array]]:
        # The plan of the recurrence depends on the number of rows that a device has.
        with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
            return steps.train_steps(state, stream, hyper, program=run.program, num_steps=num_steps)

    return jax.jit(
        train_steps,
        static_argnames="num_steps",
        donate_argnames="state",
        out_shardings=(shardings, partitioning.replicated(run.mesh)),
    )


def make_turn_evaluation(run: runs.Run) -> turn_evaluation.TurnEvaluation:
    """Makes the evaluation that runs before each turn.

    Its batch has as many rows as training computes at a time, which are one of the groups whose
    gradients are accumulated.
    """
    return turn_evaluation.TurnEvaluation(
        run.model,
        run.task,
        run.config.evaluation,
        batch_size=run.batch_size // run.program.accumulate,
        window=run.config.data.window,
    )


def shardings_of(tree: PyTree) -> PyTree:
    """The sharding of every leaf of a tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
