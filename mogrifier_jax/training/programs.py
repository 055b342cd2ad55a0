"""What training compiles: `Alone` is one run on all devices, `Together` many runs side by side.

Axes: N runs, S steps, W windows; others as in `steps.py`. Runs side by side have the same shapes
and other numbers. Weights, optimizer and carries are stacked [N, ...] and the steps vmapped. Step,
text and key are shared, as all runs are at the same step and have the same seed. Over several
devices the runs lie along the mesh axis "trial", and no device speaks to another. `train.py`
carries the runs out.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import partitioning
from mogrifier_jax.training import evaluate, runs, steps

# The axes of a stack of states; None is what all runs share.
STACK = steps.TrainState(step=None, params=0, opt_state=0, average=0, carry=0, key=None)  # type: ignore[arg-type]


def make_mesh(count: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Axes ("trial", "data", "model") over as many devices as share `count` runs evenly."""
    devices = jax.devices() if devices is None else devices
    size = max(n for n in range(1, min(count, len(devices)) + 1) if count % n == 0)
    grid = np.asarray(devices[:size]).reshape(size, 1, 1)
    return Mesh(grid, ("trial", "data", "model"), axis_types=(AxisType.Auto,) * 3)


def home(mesh: Mesh) -> Mesh:
    """The first device, which a run is saved from and restored to."""
    return partitioning.make_mesh(devices=mesh.devices.flat[:1])


def side_by_side(function: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Any:
    """`vmap`, but one item alone has no extra axis: a CPU is slower at batched matmuls."""

    def call(*args):
        stacked = jax.tree.leaves(
            map_axes(lambda axis, part: part if axis == 0 else (), in_axes, args)
        )
        if stacked[0].shape[0] > 1:
            return jax.vmap(function, in_axes, out_axes)(*args)
        args = change_stacked(lambda a: a[0], in_axes, args)
        return change_stacked(lambda a: a[None], out_axes, function(*args))

    return call


def map_axes(function: Callable[..., Any], axes: Any, *values: Any) -> Any:
    """Calls function(axis, *parts) for each axis and the parts of the values that have it."""
    return jax.tree.map(function, axes, *values, is_leaf=lambda axis: axis is None)


def change_stacked(change: Callable[..., Any], axes: Any, *values: Any) -> Any:
    """Changes the leaves that are stacked; of what is shared the first value is taken."""

    def change_part(axis, *parts):
        return parts[0] if axis is None else jax.tree.map(change, *parts)

    return map_axes(change_part, axes, *values)


def places(mesh: Mesh, axes: Any) -> Any:
    """Where values with these axes lie. jit is told: for another place it would compile again."""
    specs = {0: PartitionSpec("trial"), None: PartitionSpec()}
    return map_axes(lambda axis: NamedSharding(mesh, specs[axis]), axes)


def spread(
    function: Callable[..., Any], mesh: Mesh, in_axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """A function of N runs, each device with its share."""
    return jax.shard_map(
        side_by_side(function, in_axes, out_axes),
        mesh=mesh,
        in_specs=jax.tree.map(lambda place: place.spec, places(mesh, in_axes)),
        out_specs=jax.tree.map(lambda place: place.spec, places(mesh, out_axes)),
        check_vma=False,
    )


def jit_steps(program: steps.Program, mesh: Mesh) -> jax.stages.Wrapped:
    """(state, stream, hyper, num_steps=...) to (state, metrics [N, S]) of a stack."""

    def train_steps(state, stream, hyper, *, num_steps):
        one = functools.partial(steps.train_steps, program=program, num_steps=num_steps)
        return spread(one, mesh, (STACK, None, 0), (STACK, 0))(state, stream, hyper)

    return jax.jit(
        train_steps,
        static_argnames="num_steps",
        donate_argnames="state",
        out_shardings=places(mesh, (STACK, 0)),
    )


class Together:
    """What N runs of one shape compile; `run` is any of them, on the mesh of the stack.

    Stacks of the same size and shape may share it. `Alone` has the same methods.
    """

    def __init__(self, run: runs.Run, count: int, mesh: Mesh):
        self.run, self.count, self.mesh = run, count, mesh
        average = run.program.average
        self._steps = jit_steps(run.program, mesh)
        self._init = jax.jit(run.init_state, out_shardings=places(mesh, None))
        self._candidates = self._jit(average.candidates, (0, 0))
        self._value = self._jit(average.value, (0, 0))

        def after_evaluation(state, start, xes):
            state = average.after_evaluation(state, *xes)
            return jax.tree.map(lambda a, b: jnp.where(start, a, b), average.start(state), state)

        self._after_evaluation = self._jit(after_evaluation, (0, 0, 0))
        self._evaluate = run.turn_evaluation(
            make=functools.partial(StackedPass, count=count, mesh=mesh)
        )

    def _jit(self, function, in_axes):
        together = spread(function, self.mesh, in_axes, 0)
        return jax.jit(together, out_shardings=places(self.mesh, 0))

    def _fill(self, values: Sequence[Any], value: Any) -> list[Any]:
        """As many values as the program has runs."""
        return [*values, *[value] * (self.count - len(values))]

    def init(self) -> steps.TrainState:
        """Fresh states, all the same: they differ in what is done to them."""
        return self.stack([self._init()])

    def stack(self, states: Sequence[steps.TrainState]) -> steps.TrainState:
        """States of runs at the same step as one, the first one repeated to fill it up."""
        filled = self._fill(states, states[0])
        stacked = change_stacked(lambda *leaves: np.stack(leaves), STACK, *filled)
        return jax.device_put(stacked, places(self.mesh, STACK))

    def unstack(self, state: steps.TrainState, number: int) -> list[steps.TrainState]:
        """The states of the first `number` runs, each on the first device."""
        # Copied: on a CPU this may be a view of memory that is donated later.
        host = change_stacked(np.array, STACK, state)
        place = partitioning.replicated(home(self.mesh))
        return [
            jax.device_put(change_stacked(lambda leaf, i=i: leaf[i], STACK, host), place)
            for i in range(number)
        ]

    def train_steps(
        self, state: steps.TrainState, hyper: Sequence[steps.Hyperparameters], num_steps: int
    ) -> tuple[steps.TrainState, dict[str, np.ndarray]]:
        """Some steps of all runs, and the metrics of each, [N, S]."""
        columns = jax.tree.map(
            lambda *values: np.asarray(values, np.float32), *self._fill(hyper, hyper[0])
        )
        columns = jax.device_put(columns, places(self.mesh, 0))
        state, found = self._steps(state, self.run.task.stream, columns, num_steps=num_steps)
        return state, jax.tree.map(np.asarray, found)

    def evaluate_turn(
        self, state: steps.TrainState
    ) -> tuple[list[list[evaluate.Scores]], np.ndarray]:
        """Scores by candidate, then by run, and which runs are averaged."""
        weights = self._candidates(state.average, state.params)
        scores = [self._evaluate(candidate) for candidate in weights]
        averaged = np.asarray(self.run.program.average.is_on(state.average))
        return scores, np.broadcast_to(averaged, self.count)

    def after_evaluation(
        self, state: steps.TrainState, start: Any, xes: Sequence[Any]
    ) -> steps.TrainState:
        """Averages after the candidates of all runs have been scored; `start` says whose begin."""
        start, xes = np.asarray(start), tuple(np.asarray(xe, np.float32) for xe in xes)
        average = self._after_evaluation(state.average, start, xes)
        return dataclasses.replace(state, average=average)

    def score(
        self, states: Sequence[steps.TrainState], temperatures: Sequence[float]
    ) -> dict[str, np.ndarray]:
        """Nats per token [N] of the averaged weights on validation and test data."""
        # They may be of different steps: only their weights are read.
        stack = self.stack(states)
        weights = self._value(stack.average, stack.params)
        temperatures = self._fill(temperatures, 1.0)
        return {
            split: self._evaluate.score(split, weights, temperatures) for split in ("valid", "test")
        }


class StackedPass(evaluate.Deterministic):
    """The pass of N weights; logit scales are [K] for all of them, or [N, K]."""

    def __init__(self, *args: Any, count: int, mesh: Mesh, **options: Any):
        self._count, self._mesh = count, mesh
        super().__init__(*args, **options)

    def _bind(self, run, params, logit_scales):
        scales = np.asarray(logit_scales)
        scales = np.broadcast_to(scales, (self._count, scales.shape[-1]))
        return super()._bind(run, params, scales)

    def _jit(self, run):
        in_place = places(self._mesh, 0)

        def zeros():
            carry = evaluate.zero_carry(self.model, self.plan)
            return jax.tree.map(lambda a: jnp.zeros((self._count, *a.shape), a.dtype), carry)

        self._zero_carry = jax.jit(zeros, out_shardings=in_place)
        together = spread(run, self._mesh, (0, None, 0, None, None, 0), 0)
        return jax.jit(together, donate_argnums=2, out_shardings=in_place)


class Alone:
    """What one run compiles; runs that differ only in numbers that are traced may share it."""

    def __init__(self, run: runs.Run):
        self.run = run
        average = run.program.average
        in_place = runs.shardings_of(run.abstract_state())
        self.init = jax.jit(run.init_state, out_shardings=in_place)
        self._steps = run.jit_steps()
        # An average that changed its place would have the train step compiled again.
        self._candidates = jax.jit(average.candidates)
        self._value = jax.jit(average.value)
        self._is_on = jax.jit(average.is_on)
        self._after_evaluation = jax.jit(average.after_evaluation, out_shardings=in_place.average)
        self._start_averaging = jax.jit(average.start, out_shardings=in_place.average)
        self._evaluate = run.turn_evaluation()

    def stack(self, states: Sequence[steps.TrainState]) -> steps.TrainState:
        """The state of the one run, as it is."""
        (state,) = states
        return state

    def unstack(self, state: steps.TrainState, number: int) -> list[steps.TrainState]:
        """The inverse of `stack`."""
        del number
        return [state]

    def train_steps(
        self, state: steps.TrainState, hyper: Sequence[steps.Hyperparameters], num_steps: int
    ) -> tuple[steps.TrainState, dict[str, np.ndarray]]:
        """Some steps, and the metrics of each, [1, S]."""
        stream = self.run.task.stream
        state, found = self._steps(state, stream, hyper[0], num_steps=num_steps)
        return state, jax.tree.map(lambda values: np.asarray(values)[None], found)

    def evaluate_turn(
        self, state: steps.TrainState
    ) -> tuple[list[list[evaluate.Scores]], np.ndarray]:
        """Scores by candidate, and whether any of them is an average."""
        weights = self._candidates(state.average, state.params)
        scores = [[self._evaluate(candidate)] for candidate in weights]
        return scores, np.asarray([self._is_on(state.average)])

    def after_evaluation(
        self, state: steps.TrainState, start: Sequence[bool], xes: Sequence[Sequence[float]]
    ) -> steps.TrainState:
        """The average after its candidates have been scored; `start` says whether it begins."""
        average = self._after_evaluation(state.average, *(xe for (xe,) in xes))
        if start[0]:
            average = self._start_averaging(average)
        return dataclasses.replace(state, average=average)

    def score(
        self, states: Sequence[steps.TrainState], temperatures: Sequence[float]
    ) -> dict[str, list[float]]:
        """Nats per token of the averaged weights on validation and test data."""
        weights = self._value(states[0].average, states[0].params)
        return {
            split: [self._evaluate.score(split, weights, temperatures[0])]
            for split in ("valid", "test")
        }
