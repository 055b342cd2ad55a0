"""The training loop: prepare, restore, then turns of evaluation and steps, then final scores.

A run is `turns` x `steps_per_turn` optimizer steps with an evaluation before each turn. Started
again in the same workdir, it continues with exactly the numbers of an unbroken run, because the
state holds everything that they depend on and because dispatches end at the same steps whether or
not the run was interrupted.

`runs.py` makes a run from a config, `programs.py` compiles it, `run_record.py` writes its workdir,
and `schedule.py` makes the decisions between turns.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import buckets, errors, files
from mogrifier_jax.training import (
    learning_curves,
    logs,
    profiling,
    programs,
    progress,
    run_record,
    runs,
    schedule,
    signals,
    summaries,
    workdirs,
)


def train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, *, profile_steps: str | None = None
) -> files.JsonObject:
    """Trains to the end of the schedule, or until a request to stop; returns the results."""
    with buckets.mounted(workdir, exclusive=True) as workdir:
        trace = profiling.Trace(workdir, profile_steps)
        workdirs.check_place(workdir)
        workdirs.check_config(workdir, config)
        with contextlib.ExitStack() as stack:
            # From here on, signals are only noted: an exception inside the compiler would be lost.
            with signals.StopRequests() as stop_requests:
                run = runs.make_run(config)
                stop_requests.check()
                record = stack.enter_context(run_record.open_record(run, workdir))
                stack.enter_context(logs.copied_to(os.path.join(workdir, "run.log")))
                logging.info("\n%s", summaries.describe_run(run, workdir))
                compiled = programs.Programs(run)
                train_turns(record, compiled, stop_requests, trace=trace)
            results = score_best(record, compiled)
        if jax.process_index() == 0:
            try:
                learning_curves.draw(workdir, unit=run.task.score_unit)
            except ImportError:
                logging.info("no learning_curve.png: matplotlib is not installed")
            logging.info("\n%s", summaries.describe_results(results, run.task.score_unit, workdir))
        return results


def train_turns(
    record: run_record.RunRecord,
    compiled: programs.Programs,
    stop_requests: signals.StopRequests,
    *,
    trace: profiling.Trace | None = None,
    on_turn: Callable[[int, float], schedule.Stop | None] | None = None,
) -> schedule.Stop:
    """Trains turn after turn from the newest checkpoint; returns why the run has ended.

    Args:
      on_turn: called after each evaluation with the turn and the best cross-entropy so far. It ends
        the run if it returns a reason, which is how trials are pruned. Without it, each turn is
        logged.
    """
    run, trace = record.run, trace or profiling.Trace(record.workdir)
    state = record.restore()
    stop_requests.check()
    if state is None:
        state = compiled.init()
    step = int(state.step)
    with progress.Bar(
        run.rules.turns * run.rules.steps_per_turn,
        run.tokens_per_step,
        first_step=step,
        unit=run.task.score_unit,
    ) as bar:
        while (ended := record.ended) is None:
            if stop_requests.requested():
                record.save_now(state)
                raise errors.Interrupted(
                    f"stopped at step {step}, saved in {record.workdir}; repeat the command to "
                    "resume"
                )

            # A turn begins: evaluate, decide, save.
            if step >= record.end_of_turn:
                with bar.paused():
                    weights = compiled.candidates(state.average, state.params)
                    scores = [compiled.evaluate(candidate) for candidate in weights]
                    averaged = bool(compiled.is_averaged(state.average))
                nats = [candidate.valid_nats for candidate in scores]
                best = scores[int(np.argmin(nats))]
                decision = record.decide(step, best, averaged=averaged)
                if on_turn is None:
                    logging.info("%s", record.describe_turn(best, decision))
                if decision.restart:
                    state = record.restart(step)
                else:
                    average = compiled.after_evaluation(state.average, *nats)
                    if decision.start_averaging:
                        average = compiled.start_averaging(average)
                    state = dataclasses.replace(state, average=average)
                    record.save(state, best=decision.improved, temperature=best.temperature)
                if on_turn and (ended := on_turn(record.progress.turn, record.progress.best_xe)):
                    break
                continue

            # One dispatch: `log_every` steps, or the rest of the turn.
            count = min(run.config.log_every, record.end_of_turn - step)
            started = time.perf_counter()
            with trace.steps(step, count):
                state, measured = compiled.train_steps(
                    state, run.task.stream, record.hyper, num_steps=count
                )
                measured = jax.tree.map(np.asarray, measured)
            loss = record.write_steps(step, measured, time.perf_counter() - started)
            step += count
            bar.update(step, loss)
            if math.isnan(loss):
                state = record.restart(step)
    logging.info("stopping: %s", ended.message)
    return ended


def score_best(record: run_record.RunRecord, compiled: programs.Programs) -> files.JsonObject:
    """The results: the best weights on validation and test, at the temperature of their turn."""
    best = record.restore_best()
    weights = compiled.best_weights(best.state.average, best.state.params)
    nats = {
        split: compiled.evaluate.score(split, weights, best.info["temperature"])
        for split in ("valid", "test")
    }
    return record.write_results(best, nats)
