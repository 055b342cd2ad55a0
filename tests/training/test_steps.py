"""The train step: lamb's losses, accumulation, resets, and what does not compile again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax.data import streams
from mogrifier_jax.nn import dropout, models
from mogrifier_jax.training import averaging, optimizers, steps
from tests import golden, quick


def make_program(model, optimizer, **options):
    none = averaging.make_averaging("none")
    return steps.Program(model, optimizer, none, batch_at=lambda stream, step: stream, **options)


def make_state(program, params, carry):
    return steps.TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=program.optimizer.init(params),
        average=(),
        carry=carry,
        key=jax.random.key(3),
    )


def jit_step(program):
    return quick.jit(functools.partial(steps.train_step, program=program))


@functools.cache
def make_case(case, optimizer="adam", clip_norm=0.5, **options):
    """Program, parameters and jitted step of one of lamb's cases."""
    model, params = golden.make(case)
    program = make_program(
        model, optimizers.make_optimizer(optimizer, clip_norm=clip_norm), **options
    )
    return program, params, jit_step(program)


def losses_of_lamb(case, num_steps, **hyper):
    """Mean over stripes of the nats of the batch before each of the updates."""
    program, params, step = make_case(case)
    batch = streams.Window(*map(jnp.asarray, golden.batch()), jnp.asarray(golden.LENGTHS))
    zeros = program.model.zero_carry(golden.BATCH)
    state = make_state(program, params, zeros)
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state.replace(carry=zeros), batch, steps.Hyperparameters(**hyper))
        losses.append(metrics["loss_nats"] * golden.LENGTHS.sum() / golden.BATCH)
    return np.array(losses)


@pytest.mark.parametrize("case", quick.mostly_slow(golden.CASES, "A"))
def test_losses_follow_lambs_trajectory(case):
    losses = losses_of_lamb(case, 4, learning_rate=0.01, l2_penalty=0.01)
    np.testing.assert_allclose(losses, golden.TRAJECTORIES[case], rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [{"l2_penalty": 0.0}, {"learning_rate": 0.0101}])
def test_another_penalty_or_rate_leaves_lambs_trajectory(change):
    hyper = {"learning_rate": 0.01, "l2_penalty": 0.01} | change
    losses = losses_of_lamb("D", 4, **hyper)
    assert abs(losses - golden.TRAJECTORIES["D"])[-1] > 3e-5


def accumulated(reduce, groups, l2_penalty=0.5, dropout=models.Dropout(), at_once=False):
    """Gradients, metrics and carry of one step of plain SGD on eight stripes."""
    options = dict(accumulate=groups, accumulate_reduce=reduce, accumulate_at_once=at_once)
    program, params, step = make_case("D", "sgd", None, **options)
    lengths = jnp.array([4, 3, 4, 4, 1, 4, 2, 4])
    batch = streams.Window(*map(jnp.asarray, golden.batch(batch_size=8)), lengths)
    carry = jax.tree.map(
        lambda a: a + jnp.linspace(-0.5, 0.5, 8)[:, None].astype(a.dtype),
        program.model.zero_carry(8),
    )
    hyper = steps.Hyperparameters(learning_rate=1.0, l2_penalty=l2_penalty, dropout=dropout)
    state, metrics = step(make_state(program, params, carry), batch, hyper)
    return jax.tree.map(jnp.subtract, params, state.params), metrics, state.carry


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_batch_or_n_times_them():
    whole, metrics, carry = accumulated("mean", 1)
    mean, mean_metrics, mean_carry = accumulated("mean", 4)
    total, total_metrics, total_carry = accumulated("sum", 4)
    assert_close(mean, whole, rtol=1e-5, atol=1e-6)
    # Four times everything, the penalty included.
    assert_close(total, jax.tree.map(lambda g: 4 * g, whole), rtol=1e-5, atol=4e-6)
    assert_close(total_metrics["grad_norm"], 4 * metrics["grad_norm"], rtol=1e-5)
    # What is reported, and the state of each stripe, do not depend on the groups.
    for found in (mean_metrics, total_metrics):
        assert_close(found["loss_nats"], metrics["loss_nats"], rtol=1e-6)
    for found in (mean_carry, total_carry):
        assert_close(found, carry, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_groups_at_once_draw_the_same_masks_and_have_the_same_gradients():
    dropout = models.Dropout(input=0.3, inter_layer=0.3, state=0.3, output=0.3)
    one_by_one = accumulated("sum", 4, dropout=dropout)
    assert_close(accumulated("sum", 4, dropout=dropout, at_once=True), one_by_one, atol=5e-6)
    # Other groups have other masks.
    halves = accumulated("sum", 2, dropout=dropout, at_once=True)
    assert abs(halves[1]["loss_nats"] - one_by_one[1]["loss_nats"]) > 1e-3


@pytest.mark.slow
def test_the_penalty_counts_once_for_each_summed_group():
    without, with_penalty = (accumulated("sum", 4, l2)[0] for l2 in (0.0, 0.5))
    params = golden.make("D")[1]
    added = jax.tree.map(jnp.subtract, with_penalty, without)
    assert_close(added, jax.tree.map(lambda p: 4 * 0.5 * p, params), rtol=1e-4, atol=1e-5)
    largest = max(float(jnp.abs(p).max()) for p in jax.tree.leaves(params))
    assert largest > 0.4  # Or else nothing was compared.


def test_groups_come_back_in_their_order():
    tree = {"a": jnp.arange(24.0).reshape(12, 2), "b": jnp.arange(12)}
    for groups in (1, 3, 4):
        parts = steps.into_groups(tree, groups)
        assert parts["a"].shape == (groups, 12 // groups, 2)
        assert_close(steps.from_groups(parts), tree)


class SmallModel:
    """Program, state, batch and step of a small model with dropout."""

    def __init__(self):
        self.model = models.make_model(11, hidden_size=8, num_layers=1, rounds=1, rank=2)
        self.program = make_program(self.model, optimizers.make_optimizer())
        key = jax.random.key(0)
        self.init = quick.jit(
            functools.partial(steps.init_state, program=self.program),
            static_argnames=("batch_size", "carries"),
        )
        self.state = self.init(key, batch_size=4)
        tokens = jax.random.randint(key, (4, 6), 0, 11)
        self.batch = streams.Window(tokens[:, :-1], tokens[:, 1:])
        self.step = jit_step(self.program)
        self.hyper = steps.Hyperparameters(0.01, 1e-3, 0.01, models.Dropout(0.1, None, 0.2, 0.3))


@pytest.fixture(scope="module")
def small():
    return SmallModel()


@pytest.mark.slow
def test_tuned_numbers_do_not_compile_again(small):
    small.step(small.state, small.batch, small.hyper)
    compiled = small.step._cache_size()
    for change in (
        {"learning_rate": 0.5},
        {"l2_penalty": 0.1},
        {"drop_state_probability": 0.9},
        {"dropout": models.Dropout(0.3, None, 0.01, 0.0)},
    ):
        small.step(small.state, small.batch, small.hyper._replace(**change))
    assert small.step._cache_size() == compiled
    # A rate that was absent is another program.
    more = small.hyper._replace(dropout=models.Dropout(0.1, None, None, 0.3))
    small.step(small.state, small.batch, more)
    assert small.step._cache_size() == compiled + 1


@pytest.mark.slow
def test_many_steps_are_single_steps(small):
    together = quick.jit(
        functools.partial(steps.train_steps, program=small.program), static_argnames="num_steps"
    )
    final, metrics = together(small.state, small.batch, small.hyper, num_steps=3)
    state, losses = small.state, []
    for _ in range(3):
        state, found = small.step(state, small.batch, small.hyper)
        losses.append(found["loss_nats"])
    np.testing.assert_allclose(metrics["loss_nats"], losses, rtol=1e-6)
    assert_close(final.params, state.params, rtol=1e-5, atol=1e-6)
    assert int(final.step) == 3
    assert len(set(map(float, losses))) == 3  # The masks and weights of each step are its own.


@pytest.mark.slow
def test_masks_depend_on_seed_and_step_alone(small):
    def loss(**changes):
        return float(
            small.step(small.state.replace(**changes), small.batch, small.hyper)[1]["loss_nats"]
        )

    assert loss() == loss()
    assert loss(step=jnp.int32(7)) != loss()
    assert loss(key=jax.random.key(9)) != loss()


@pytest.mark.slow
def test_stripes_are_reset_but_not_before_the_first_window(small):
    carry = jax.tree.map(jnp.ones_like, small.state.carry)
    key = jax.random.key(1)

    def share_kept(step, probability):
        kept = steps.reset_stripes(carry, key, jnp.int32(step), probability)
        values = {float(leaf.mean()) for leaf in jax.tree.leaves(kept)}
        assert len(values) == 1  # All layers, c and h together.
        return values.pop()

    assert share_kept(0, 1.0) == share_kept(5, 0.0) == 1
    assert share_kept(5, 1.0) == 0
    assert 0 < np.mean([share_kept(step, 0.5) for step in range(1, 20)]) < 1
    assert steps.reset_stripes((), key, jnp.int32(5), 1.0) == ()


@pytest.mark.slow
def test_weights_depend_on_the_seed_alone(small):
    other = small.init(jax.random.key(0), batch_size=2, carries=False)
    assert other.carry == ()
    assert_close(other.params, small.state.params)
    changed = small.init(jax.random.key(1), batch_size=4)
    assert float(jnp.abs(changed.params["embedding"] - other.params["embedding"]).max()) > 0.1


# Several dropout samples.

B, STEPS = 4, 5


class Samples:
    """A step of plain SGD with D samples of each of four stripes."""

    def __init__(self, samples, **options):
        model = models.make_model(
            11, hidden_size=8, num_layers=2, cell="rewired_lstm", rounds=1, rank=2
        )
        self.program = make_program(
            model,
            optimizers.make_optimizer("sgd", clip_norm=None),
            training_samples=samples,
            **options,
        )
        init = functools.partial(steps.init_state, program=self.program, batch_size=B)
        self.state = quick.jit(init)(jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (B, STEPS + 1), 0, 11)
        lengths = jnp.array([5, 3, 5, 4])
        self.batch = streams.Window(tokens[:, :-1], tokens[:, 1:], lengths)

    def __call__(self, carry=None, dropout=models.Dropout(0.2, 0.1, 0.3, 0.4)):
        """Loss, gradients and the carry after the step."""
        state = self.state if carry is None else self.state.replace(carry=carry)
        hyper = steps.Hyperparameters(1.0, 0.0, dropout=dropout)
        after, metrics = jit_step(self.program)(state, self.batch, hyper)
        grads = jax.tree.map(jnp.subtract, state.params, after.params)
        return metrics["loss_nats"], grads, after.carry


def some_carry(like, rows):
    """Another carry for each of the rows, each repeated to fill the carry."""

    def fill(a):
        drawn = np.random.default_rng(a.shape[-1]).standard_normal((rows, a.shape[-1]))
        return jnp.asarray(np.repeat(drawn, len(a) // rows, 0), a.dtype)

    return jax.tree.map(fill, like)


@pytest.fixture
def same_masks(monkeypatch):
    """All samples of a stripe get the masks that the stripe has if there is one sample.

    The list has the shapes of the masks. When it is cleared, the same masks are drawn again.
    """
    shapes = []

    def keep_mask(rate, shape, key):
        del key
        shapes.append(shape)
        axis = next(i for i, size in enumerate(shape) if size in (B, 3 * B))
        rng = np.random.default_rng(len(shapes))
        mask = rng.random((*shape[:axis], B, *shape[axis + 1 :])) >= rate
        return jnp.asarray(np.repeat(mask, shape[axis] // B, axis))

    monkeypatch.setattr(dropout, "keep_mask", keep_mask)
    return shapes


@pytest.mark.slow
def test_equal_samples_are_one_sample(same_masks):
    found = {}
    for samples in (1, 3):
        same_masks.clear()
        step = Samples(samples)
        found[samples] = step(some_carry(step.state.carry, B))
    (loss, grads, carry), (loss_3, grads_3, carry_3) = found[1], found[3]
    np.testing.assert_allclose(loss_3, loss, rtol=1e-6)
    assert_close(grads_3, grads, rtol=1e-4, atol=1e-6)
    assert_close(carry_3, steps.repeat_rows(carry, 3), rtol=1e-5, atol=1e-6)
    assert len(same_masks) == 5 and {3 * B} <= set(same_masks[0])
    other = step(some_carry(step.state.carry, B))[0]  # These masks are others.
    assert abs(other - loss) > 1e-3


@pytest.mark.slow
def test_the_objective_is_the_mean_of_probabilities():
    step = Samples(3)
    carry = some_carry(step.state.carry, 3 * B)
    dropout = models.Dropout(0.2, 0.1, 0.3, 0.4)
    loss, grads, end = step(carry, dropout)

    # The rows by themselves, with the masks of the step.
    _, dropout_key = jax.random.split(jax.random.fold_in(step.state.key, 0))
    rngs = {"dropout": jax.random.fold_in(dropout_key, 0)}
    batch = jax.tree.map(lambda a: jnp.asarray(np.repeat(a, 3, 0)), step.batch)

    def rows(params):
        return step.program.model.apply(
            {"params": params}, batch, carry, dropout, rngs=rngs, method="batch_nats"
        )

    expected_end, nats = quick.jit(rows)(step.state.params)
    by_sample = np.asarray(nats, np.float64).reshape(B, 3, STEPS)
    objective = -np.log(np.exp(-by_sample).mean(1))
    assert abs(by_sample[:, 0] - by_sample[:, 1]).max() > 0.01  # The samples differ.
    np.testing.assert_allclose(loss, objective.sum() / 17, rtol=1e-5)
    assert loss < by_sample.mean(1).sum() / 17 - 1e-4  # Not the mean of log-probabilities.
    assert_close(end, expected_end, rtol=1e-5, atol=1e-6)

    # Each sample counts in the gradient by its share of the probability.
    shares = np.exp(-by_sample) / np.exp(-by_sample).sum(1, keepdims=True)
    weights = jnp.asarray(shares.reshape(nats.shape) / B, jnp.float32)
    expected = quick.jit(jax.grad(lambda params: (weights * rows(params)[1]).sum()))(
        step.state.params
    )
    assert_close(grads, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_samples_of_a_stripe_stay_together_in_groups(at_once):
    whole, grouped = Samples(3), Samples(3, accumulate=2, accumulate_at_once=at_once)
    carry = some_carry(whole.state.carry, 3 * B)
    none = models.Dropout()
    found, expected = grouped(carry, none), whole(carry, none)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda a: jnp.roll(a, 1, 0), carry)
    assert abs(grouped(moved, none)[0] - expected[0]) > 1e-5
