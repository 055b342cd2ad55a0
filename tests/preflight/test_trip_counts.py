import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mogrifier_jax.preflight import costs, hlo, trip_counts


def program(text):
    return hlo.parse(textwrap.dedent(text).strip())


# The limit of the inner loop is a constant of the entry, carried through the tuples of both loops;
# the outer loop counts down in threes and its condition is a fusion.
CARRIED_LIMIT = """
HloModule carried_limit

%inner_body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %limit = s32[]{:T(128)} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, /*index=1*/s32[]{:T(128)}) tuple(%next, %limit)
}

%inner_cond (p.1: (s32[], s32[])) -> pred[] {
  %p.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit.1 = s32[] get-tuple-element(%p.1), index=1
  ROOT %less = pred[] compare(%i.1, %limit.1), direction=LT
}

%outer_body (q: (s32[], s32[], f32[8,128])) -> (s32[], s32[], f32[8,128]) {
  %q = (s32[], s32[], f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %bound = s32[] get-tuple-element(%q), index=1
  %x = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%q), index=2
  %zero = s32[] constant(0)
  %init = (s32[], s32[]) tuple(%zero, %bound)
  %inner = (s32[], s32[]) while(%init), condition=%inner_cond, body=%inner_body
  %three = s32[] constant(3)
  %down = s32[] subtract(%j, %three)
  %y = f32[8,128]{1,0:T(8,128)S(1)} negate(%x)
  ROOT %out.1 = (s32[], s32[], f32[8,128]{1,0:T(8,128)S(1)}) tuple(%down, %bound, %y)
}

%positive (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %nought = s32[] constant(0)
  ROOT %greater = pred[] compare(%a, %nought), direction=GT
}

%outer_cond (q.1: (s32[], s32[], f32[8,128])) -> pred[] {
  %q.1 = (s32[], s32[], f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %j.1 = s32[] get-tuple-element(%q.1), index=0
  ROOT %fused = pred[] fusion(%j.1), kind=kLoop, calls=%positive
}

ENTRY %main (x.1: f32[8,128]) -> f32[8,128] {
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = s32[] constant(12)
  %start.copy = s32[] copy(%start)
  %eleven = s32[] constant(11)
  %init.1 = (s32[], s32[], f32[8,128]{1,0:T(8,128)S(1)}) tuple(%start.copy, %eleven, %x.1)
  %outer = (s32[], s32[], f32[8,128]{1,0}) while(%init.1), condition=%outer_cond, body=%outer_body
  ROOT %result = f32[8,128]{1,0:T(8,128)} get-tuple-element(%outer), index=2
}
"""


def loops(module):
    """(name, trips) of the loops in `CARRIED_LIMIT`, outer first."""
    entry = module.entry
    init = trip_counts.Evaluator(module, entry, [None])("init.1")
    outer, body = entry.instructions["outer"], module.computations["outer_body"]
    inside = trip_counts.Evaluator(module, body, [trip_counts.loop_invariants(body, init)])("init")
    return trip_counts.trip_count(module, outer, init), trip_counts.trip_count(
        module, body.instructions["inner"], inside
    )


def test_limits_are_followed_through_tuples_and_fusions():
    assert loops(program(CARRIED_LIMIT)) == (4, 11)


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("constant(11)", "constant(5)", (4, 5)),
        ("constant(12)", "constant(13)", (5, 11)),
        ("constant(12)", "constant(0)", (0, 11)),
        ("constant(3)", "constant(-3)", (None, 11)),  # Never ends.
        # A limit that the outer body changes is not known.
        ("tuple(%down, %bound, %y)", "tuple(%down, %down, %y)", (4, None)),
    ],
)
def test_trip_counts_follow_the_program(monkeypatch, old, new, trips):
    monkeypatch.setattr(trip_counts, "MAX_TRIPS", 100)
    assert old in CARRIED_LIMIT
    assert loops(program(CARRIED_LIMIT.replace(old, new))) == trips


def test_the_compilers_own_trip_count_is_taken_first():
    text = CARRIED_LIMIT.replace(
        "body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"40"}}'
    )
    assert loops(program(text))[0] == 40


def test_a_loop_is_counted_where_the_compiler_says_how_often_it_turns():
    text = CARRIED_LIMIT.replace(
        "body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"40"}}'
    )
    assert trip_counts.is_annotated(hlo.parse(text).entry.instructions["outer"])
    assert not trip_counts.is_annotated(hlo.parse(CARRIED_LIMIT).entry.instructions["outer"])


def test_loops_of_a_real_program_with_and_without_annotation():
    def nested(x):
        def inner(x, _):
            return jnp.sin(x), None

        def outer(x, _):
            return lax.scan(inner, x, None, length=5)[0] * 2, None

        return lax.scan(outer, x, None, length=3)[0]

    text = jax.jit(nested).lower(jnp.ones((64, 64))).compile().as_text()
    plain = text.replace('"known_trip_count"', '"forgotten"')
    assert plain != text

    def counts(text):
        return sorted(loop.trips for loop in costs.analyse(text).loops)

    assert counts(text) == counts(plain) == [3, 5]
