"""Listings written by hand, in the syntax of the TPU compiler."""

import re

import pytest

from mogrifier_jax.preflight import listings

# Seven iterations. The middle is skipped in the first two and the last one, as in a pipeline.
LOOP = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s5 = smov 0 /* copy for cssa */  ;;  %s90_s0 = inlined_call_operand.vmem }
   0x1 LB: > { %s2_s5 = sphi %s1_s5, %s3_s5  ;;  %p1_p0 = scmp.ge.s32.totalorder %s2_s5, 2 }
   0x2   : > { %p2_p1 = scmp.lt.s32.totalorder %s2_s5, 6  ;;  %s4_s6 = sadd.s32 4294967295, %s2_s5 }
   0x3   : > { %p3_p2 = pnand %p1_p0, %p2_p1  ;;  %s5_s7 = smov 64 }
   0x4   : > { %9 = sbr.rel (%p3_p2) target bundleno = 12 (0xc)  ;;  %s6_s7 = smov (!%p3_p2), 9 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   : > { %11 = dma.done.wait (%p1_p0), %s90_s0, 64  ;;  %12 = shalt.err (!%p1_p0) /* for
%66 = dma.done.wait /*hbm=*/%s59, 9999 /*
bounds: (114, 79) */
 */  ;;  %s7_s8 = smov (%p1_p0, %s4_s6), 3 }
   0xa   : > { %20 = vmatpush.bf16.msra.mxu0 %v1  ;;  %21 = vmatmul.bf16.gmra.mxu1 %v2 }
   0xb   : > { %22 = vmatpush.xpose.msra.mxu0 %v1  ;;  %23 = vmatmul.msk.f32.gmra.mxu1 %v2 }
   0xc PF: > { %s3_s5 = sadd.s32 1, %s2_s5 /* copy for cssa */ }
   0xd   : > { %p4_p3 = scmp.ge.s32.totalorder %s3_s5, 7 /* loop exit test */ }
   0xe   :  { %30 = sbr.rel (!%p4_p3) target bundleno = 1 (0x1), region = 295 }
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  {}
"""


def count(text, delay=4):
    return listings.run(listings.parse(text), delay)


def test_loops_and_skipped_code():
    counts = count(LOOP)
    # Bundles 1 to 18 in each of seven iterations, without 9 to 11 in three of them.
    assert counts.bundles == 1 + 7 * 18 - 3 * 3
    assert (counts.dmas, counts.dma_bytes) == (4, 4 * 64 * 32)
    assert (counts.pushed, counts.multiplied) == (4 * (4 + 2), 4 * (16 + 8))
    assert counts.guesses == 0


@pytest.mark.parametrize(("trips", "executed"), [(3, 1), (7, 4), (8, 4), (60, 4)])
def test_trips_follow_from_the_exit_test(trips, executed):
    counts = count(LOOP.replace("%s3_s5, 7 /*", f"%s3_s5, {trips} /*"))
    assert counts.dmas == executed
    assert counts.bundles == 1 + trips * 18 - (trips - executed) * 3


def test_delay_slots_are_executed_after_a_branch():
    # With two of them, the branch to 12 leaves out 7 and 8, and the last two bundles run once.
    assert count(LOOP, delay=2).bundles == 1 + 7 * 16 + 2 - 3 * 5


def test_a_branch_that_depends_on_an_operand_is_a_guess():
    unknown = LOOP.replace(
        "%p4_p3 = scmp.ge.s32.totalorder %s3_s5, 7",
        "%p4_p3 = scmp.ge.s32.totalorder %s3_s5, %s90_s0",
    )
    counts = count(unknown)
    assert counts.guesses == 1
    assert counts.bundles == 1 + 18 - 3  # One iteration, the first, which skips the middle.


def test_spilled_scalars_are_known():
    spilled = LOOP.replace(
        "   0xf   :  {}", "   0xf   :  { %40 = sst [smem:[#allocation9_spill]] %s3_s5 }"
    ).replace("   0x5   :  {}", "   0x5   : > { %s8_s9 = sld [smem:[#allocation9_spill]] }")
    counts = count(re.sub(r"smov \(%p1_p0, %s4_s6\), 3", "smov 3", spilled))
    assert counts == count(LOOP)
    # The wait depends on what was stored in the iteration before, which is 2 to 5 where it runs.
    stored = count(spilled.replace("%s90_s0, 64", "%s90_s0, %s8_s9"))
    assert (stored.dma_bytes, stored.guesses) == (32 * (2 + 3 + 4 + 5), 0)


def test_an_endless_listing_is_given_up(monkeypatch):
    monkeypatch.setattr(listings, "MAX_EVENTS", 1000)
    endless = LOOP.replace("sadd.s32 1, %s2_s5 /*", "sadd.s32 0, %s2_s5 /*")
    assert count(endless).guesses == 1


def test_counts_add_up():
    one = listings.Counts(bundles=2, dmas=1, dma_bytes=32, guesses=1)
    assert one.times(3) == listings.Counts(bundles=6, dmas=3, dma_bytes=96, guesses=1)
    assert one + one == one.times(2) + listings.Counts(guesses=1)
