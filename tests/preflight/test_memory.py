import jax
import jax.numpy as jnp
import pytest

from mogrifier_jax.preflight import memory


def test_memory_of_a_donated_argument_counts_once():
    x = jnp.zeros((256, 1024), jnp.float32)
    size = x.nbytes

    def needed(**options):
        fn = jax.jit(lambda x: jnp.sin(x) + 1, **options)
        return memory.needed_by(fn.lower(x).compile())

    kept, donated = needed(), needed(donate_argnums=0)
    assert (kept.arguments, kept.outputs, kept.aliased) == (size, size, 0)
    assert donated.aliased == size
    assert kept.peak - kept.temporaries == 2 * size
    assert donated.peak - donated.temporaries == size


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (17.50G) exceeds available HBM (15.75G).",
            int(17.5 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 512.00M of 15.75G hbm.",
            512 * 2**20,
        ),
        ("RESOURCE_EXHAUSTED: some other wording", 0),
        ("INVALID_ARGUMENT: Used 3.00G of patience", None),
    ],
)
def test_refusals_for_memory_are_understood(message, needed):
    assert memory.parse_refusal(message) == needed
