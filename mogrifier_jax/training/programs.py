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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mogrifier_jax.training import evaluate, runs, steps


class States(NamedTuple):
    """The states of N runs."""

    shared: Any  # Step and key.
    stacked: Any  # Weights, optimizer, averages and carries, [N, ...].


def make_mesh(count: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Axes ("trial", "data", "model") over as many devices as share `count` runs evenly."""
    devices = jax.devices() if devices is None else devices
    size = max(n for n in range(1, min(count, len(devices)) + 1) if count % n == 0)
    grid = np.asarray(devices[:size]).reshape(size, 1, 1)
    return Mesh(grid, ("trial", "data", "model"), axis_types=(AxisType.Auto,) * 3)


def home(mesh: Mesh) -> Mesh:
    """The first device, which a run is saved from and restored to."""
    grid = mesh.devices.reshape(-1)[:1].reshape(1, 1)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def side_by_side(
    function: Callable[..., tuple], mesh: Mesh, in_axes: Sequence[int | None], out_axes: Any
) -> Callable[..., tuple]:
    """A function of N runs, each device with its share; axes are 0, or None for what is shared."""

    def on_a_device(*args):
        count = jax.tree.leaves(args[in_axes.index(0)])[0].shape[0]
        if count > 1:
            return jax.vmap(function, in_axes, out_axes)(*args)
        # The program of one run alone: batched matmuls may be slower.
        args = tuple(_map(lambda a: a[0], args, in_axes))
        return tuple(_map(lambda a: a[None], function(*args), out_axes))

    return jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=tuple(place.spec for place in places(mesh, in_axes)),
        out_specs=tuple(place.spec for place in places(mesh, out_axes)),
        check_vma=False,
    )


def places(mesh: Mesh, axes: Sequence[int | None]) -> tuple[NamedSharding, ...]:
    """Where values with these axes lie. jit is told: for another place it would compile again."""
    specs = (PartitionSpec("trial") if axis == 0 else PartitionSpec() for axis in axes)
    return tuple(NamedSharding(mesh, spec) for spec in specs)


def _map(change, values, axes):
    """Changes the leaves of those values that have an axis."""
    pairs = zip(values, axes, strict=True)
    return [jax.tree.map(change, value) if axis == 0 else value for value, axis in pairs]


def train_steps(shared, stacked, stream, hyper, *, program, num_steps):
    """`steps.train_steps` of one run, its state in two parts."""
    state = steps.TrainState(**shared, **stacked)
    state, metrics = steps.train_steps(state, stream, hyper, program=program, num_steps=num_steps)
    return *split(state), metrics


def split(state: steps.TrainState) -> States:
    """What all runs share, and what each has of its own."""
    names = ("step", "key")
    parts = {name: getattr(state, name) for name in state.__dataclass_fields__}
    return States({n: parts.pop(n) for n in names}, parts)


def jit_steps(program: steps.Program, mesh: Mesh) -> jax.stages.Wrapped:
    """(shared, stacked, stream, hyper, num_steps=...) to the same two parts and metrics [N, S]."""

    def call(shared, stacked, stream, hyper, *, num_steps):
        one = functools.partial(train_steps, program=program, num_steps=num_steps)
        spread = side_by_side(one, mesh, (None, 0, None, 0), (None, 0, 0))
        return spread(shared, stacked, stream, hyper)

    return jax.jit(
        call,
        static_argnames="num_steps",
        donate_argnames="stacked",
        out_shardings=places(mesh, (None, 0, 0)),
    )


class Together:
    """What N runs of one shape compile; `run` is any of them, on the mesh of the stack.

    Stacks of the same size and shape may share it. `Alone` has the same methods.
    """

    def __init__(self, run: runs.Run, count: int, mesh: Mesh):
        self.run, self.count, self.mesh = run, count, mesh
        self._everywhere, self._over_trials = places(mesh, (None, 0))
        average = run.program.average
        self._steps = jit_steps(run.program, mesh)
        self._init = jax.jit(lambda: split(run.init_state()), out_shardings=self._everywhere)
        self._candidates = self._jit(lambda a, p: (average.candidates(a, p),), (0, 0), (0,))
        self._value = self._jit(lambda a, p: (average.value(a, p),), (0, 0), (0,))

        def after_evaluation(state, start, xes):
            state = average.after_evaluation(state, *xes)
            on = jax.tree.map(lambda a, b: jnp.where(start, a, b), average.start(state), state)
            return (on,)

        self._after_evaluation = self._jit(after_evaluation, (0, 0, 0), (0,))
        self._evaluate = run.turn_evaluation(
            make=functools.partial(StackedPass, count=count, mesh=mesh)
        )

    def _jit(self, function, in_axes, out_axes):
        spread = side_by_side(function, self.mesh, in_axes, out_axes)
        return jax.jit(spread, out_shardings=places(self.mesh, out_axes))

    def _fill(self, values: Sequence[Any], value: Any) -> list[Any]:
        """As many values as the program has runs."""
        return [*values, *[value] * (self.count - len(values))]

    def init(self) -> States:
        """Fresh states, all the same: they differ in what is done to them."""
        one = self._init()
        return self.stack([steps.TrainState(**one.shared, **one.stacked)])

    def stack(self, states: Sequence[steps.TrainState]) -> States:
        """States of runs at the same step as one, the first one repeated to fill it up."""
        parts = [split(state) for state in states]
        trees = jax.device_get([part.stacked for part in parts])
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *self._fill(trees, trees[0]))
        shared = jax.device_put(parts[0].shared, self._everywhere)
        return States(shared, jax.device_put(stacked, self._over_trials))

    def unstack(self, state: States, number: int) -> list[steps.TrainState]:
        """The states of the first `number` runs, each on the first device."""
        # Copied: on a CPU this may be a view of memory that is donated later.
        host = jax.tree.map(np.array, state.stacked)
        place = NamedSharding(home(self.mesh), PartitionSpec())
        shared = jax.device_put(state.shared, place)
        return [
            steps.TrainState(
                **shared, **jax.device_put(jax.tree.map(lambda leaf, i=i: leaf[i], host), place)
            )
            for i in range(number)
        ]

    def step_of(self, state: States) -> int:
        """How many steps each run has made."""
        return int(state.shared["step"])

    def train_steps(
        self, state: States, hyper: Sequence[steps.Hyperparameters], num_steps: int
    ) -> tuple[States, dict[str, np.ndarray]]:
        """Some steps of all runs, and the metrics of each, [N, S]."""
        columns = jax.tree.map(
            lambda *values: np.asarray(values, np.float32), *self._fill(hyper, hyper[0])
        )
        shared, stacked, found = self._steps(
            *state,
            self.run.task.stream,
            jax.device_put(columns, self._over_trials),
            num_steps=num_steps,
        )
        return States(shared, stacked), jax.tree.map(np.asarray, found)

    def evaluate_turn(self, state: States) -> tuple[list[list[evaluate.Scores]], np.ndarray]:
        """Scores by candidate, then by run, and which runs are averaged."""
        average = state.stacked["average"]
        (weights,) = self._candidates(average, state.stacked["params"])
        scores = [self._evaluate(candidate) for candidate in weights]
        averaged = np.asarray(self.run.program.average.is_on(average))
        return scores, np.broadcast_to(averaged, self.count)

    def after_evaluation(self, state: States, start: Any, xes: Sequence[Any]) -> States:
        """Averages after the candidates of all runs have been scored; `start` says whose begin."""
        start, xes = np.asarray(start), tuple(np.asarray(xe, np.float32) for xe in xes)
        (average,) = self._after_evaluation(state.stacked["average"], start, xes)
        return state._replace(stacked=state.stacked | {"average": average})

    def score(
        self, states: Sequence[steps.TrainState], temperatures: Sequence[float]
    ) -> dict[str, np.ndarray]:
        """Nats per token [N] of the averaged weights on validation and test data."""
        # They may be of different steps: only their weights are read.
        stack = self.stack(states).stacked
        (weights,) = self._value(stack["average"], stack["params"])
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
        in_place = places(self._mesh, (0, 0))

        def zeros():
            carry = evaluate.zero_carry(self.model, self.plan)
            return jax.tree.map(lambda a: jnp.zeros((self._count, *a.shape), a.dtype), carry)

        self._zero_carry = jax.jit(zeros, out_shardings=in_place[0])
        spread = side_by_side(run, self._mesh, (0, None, 0, None, None, 0), (0, 0))
        return jax.jit(spread, donate_argnums=2, out_shardings=in_place)


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

    def step_of(self, state: steps.TrainState) -> int:
        """How many steps have been made."""
        return int(state.step)

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
