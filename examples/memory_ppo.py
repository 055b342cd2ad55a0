r"""Recurrent PPO on a T-maze: an agent that has to remember, and `resets` between its episodes.

    python examples/memory_ppo.py

The agent sees a signal at the start of a corridor and walks to the junction at its end, where the
signal says which way to turn. Corridors have random lengths, so the episodes of a batch end at
different steps. `resets` marks the first step of each episode: the recurrence starts there from a
fresh state, in the forward and in the backward pass. Axes: B environments, T time.
"""

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import mogrifier_jax

BATCH, TIME = 64, 64  # Environments, and steps between two updates.
SHORTEST, LONGEST = 10, 20  # Corridors.
WALK, TURN_LEFT, TURN_RIGHT = range(3)
EPOCHS, MINIBATCHES = 4, 4
DISCOUNT, TRACE_DECAY, CLIP, ENTROPY_BONUS = 0.99, 0.95, 0.2, 0.01


class Maze(NamedTuple):
    """The state of the environments, [B] each."""

    turn: jax.Array  # The action that earns the reward at the junction.
    length: jax.Array
    position: jax.Array


def new_mazes(key, count):
    """Starts an episode in each environment."""
    turn_key, length_key = jax.random.split(key)
    return Maze(
        turn=jax.random.randint(turn_key, (count,), TURN_LEFT, TURN_RIGHT + 1),
        length=jax.random.randint(length_key, (count,), SHORTEST, LONGEST + 1),
        position=jnp.zeros(count, int),
    )


def observe(maze):
    """What the agent sees, [B, 3]: the signal at the start, the junction, or neither."""
    signal = jnp.where(maze.turn == TURN_LEFT, -1.0, 1.0) * (maze.position == 0)
    junction = maze.position == maze.length
    return jnp.stack([signal, junction, jnp.ones_like(signal)], -1)


def act(maze, actions, key):
    """Returns (maze, rewards, done); an environment whose episode is done starts a new one."""
    done = (maze.position == maze.length) & (actions != WALK)
    moved = maze._replace(position=jnp.minimum(maze.position + (actions == WALK), maze.length))
    # Bumping into a wall costs a little.
    rewards = jnp.where(moved.position == maze.position, -0.1, 0.0)
    rewards = jnp.where(done, jnp.where(actions == maze.turn, 1.0, -1.0), rewards)
    fresh = new_mazes(key, len(actions))
    return jax.tree.map(functools.partial(jnp.where, done), fresh, moved), rewards, done


class Agent(nn.Module):
    """Observations [B, T, 3] and resets [B, T] to logits [B, T, 3] and values [B, T]."""

    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, carry, observations, resets):
        """Returns (carry, logits, values)."""
        xs = nn.tanh(nn.Dense(16)(observations))
        rnn = mogrifier_jax.RNN(self.cell, return_carry=True)
        carry, ys = rnn(xs, initial_carry=carry, resets=resets)
        return carry, nn.Dense(3)(ys), nn.Dense(1)(ys)[..., 0]


class Rollout(NamedTuple):
    """What happened in TIME steps, [B, T] each, and the carry that they started from."""

    carry: jax.Array
    observations: jax.Array
    resets: jax.Array
    actions: jax.Array
    log_probs: jax.Array
    values: jax.Array
    rewards: jax.Array
    done: jax.Array


def log_prob(logits, actions):
    """The log-probability of the chosen actions."""
    return -optax.softmax_cross_entropy_with_integer_labels(logits, actions)


def play(agent, params, world, key):
    """Plays TIME steps in all environments; returns the world, the rollout and its last value."""
    first_carry = world[0]

    def step(world, key):
        carry, maze, resets = world
        act_key, maze_key = jax.random.split(key)
        seen = observe(maze)
        carry, logits, values = agent.apply(params, carry, seen[:, None], resets[:, None])
        actions = jax.random.categorical(act_key, logits[:, 0])
        maze, rewards, done = act(maze, actions, maze_key)
        log_probs = log_prob(logits[:, 0], actions)
        record = (seen, resets, actions, log_probs, values[:, 0], rewards, done)
        return (carry, maze, done), record  # An episode that is done resets the next step.

    world, record = jax.lax.scan(step, world, jax.random.split(key, TIME))
    rollout = Rollout(first_carry, *(jnp.swapaxes(a, 0, 1) for a in record))
    carry, maze, resets = world
    last_value = agent.apply(params, carry, observe(maze)[:, None], resets[:, None])[2][:, 0]
    return world, rollout, last_value


def estimate_advantages(rollout, last_value):
    """Generalised advantage estimates [B, T] (arXiv:1506.02438)."""
    following = jnp.concatenate([rollout.values[:, 1:], last_value[:, None]], axis=1)
    goes_on = 1.0 - rollout.done
    deltas = rollout.rewards + DISCOUNT * goes_on * following - rollout.values

    def add(advantage, step):
        delta, goes_on = step
        advantage = delta + DISCOUNT * TRACE_DECAY * goes_on * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(add, jnp.zeros(BATCH), (deltas.T, goes_on.T), reverse=True)
    return advantages.T


def ppo_loss(params, agent, rollout, advantages):
    """The clipped objective (arXiv:1707.06347) with a value loss and an entropy bonus."""
    _, logits, values = agent.apply(params, rollout.carry, rollout.observations, rollout.resets)
    ratio = jnp.exp(log_prob(logits, rollout.actions) - rollout.log_probs)
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled).mean()
    value_loss = optax.l2_loss(values, rollout.values + advantages).mean()
    entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1).mean()
    return value_loss - gain - ENTROPY_BONUS * entropy


def train(cell, num_updates, seed=0):
    """Trains an agent; returns its parameters and the success rate of the episodes by update."""
    agent = Agent(cell)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))

    @jax.jit
    def update(state, world, key):
        play_key, *epoch_keys = jax.random.split(key, 1 + EPOCHS)
        world, rollout, last_value = play(agent, state[0], world, play_key)
        batch = (rollout, estimate_advantages(rollout, last_value))

        def improve(state, rows):
            params, opt_state = state
            grads = jax.grad(ppo_loss)(params, agent, *jax.tree.map(lambda a: a[rows], batch))
            updates, opt_state = tx.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        # A minibatch has the whole sequences of some environments.
        orders = jnp.stack([jax.random.permutation(key, BATCH) for key in epoch_keys])
        state, _ = jax.lax.scan(improve, state, orders.reshape(EPOCHS * MINIBATCHES, -1))
        success_rate = (rollout.rewards == 1).sum() / jnp.maximum(1, rollout.done.sum())
        return state, world, success_rate

    init_key, maze_key, run_key = jax.random.split(jax.random.key(seed), 3)
    maze = new_mazes(maze_key, BATCH)
    seen = observe(maze)
    carry = cell.initialize_carry(init_key, (BATCH, 16))
    world = (carry, maze, jnp.zeros(BATCH, bool))
    params = jax.jit(agent.init)(init_key, carry, seen[:, None], world[2][:, None])
    state = (params, tx.init(params))
    rates = []
    for number in range(num_updates):
        state, world, rate = update(state, world, jax.random.fold_in(run_key, number))
        rates.append(rate)
    return state[0], [float(rate) for rate in rates]


def main(num_updates=60):
    """Trains two agents; prints and returns the success rates of their episodes by update."""
    cells = {
        "LSTM": mogrifier_jax.LSTMCell(features=32),
        # A second round would gate the state that a GRU keeps, which could then grow without bound.
        "Mogrifier GRU": mogrifier_jax.MogrifierGRUCell(features=32, rounds=1),
    }
    rates = {}
    for name, cell in cells.items():
        params, rates[name] = train(cell, num_updates)
        mean = sum(rates[name][-10:]) / len(rates[name][-10:])
        learned = next((n for n, rate in enumerate(rates[name], 1) if rate > 0.9), None)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        print(f"{name:14} {size:6,} weights: {mean:6.1%} of the last episodes succeed;", end=" ")
        print(f"90% after {learned} updates" if learned else "never 90%")
    return rates


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
