import pytest

from mogrifier_jax.preflight import hlo


def test_shapes():
    shape = "(bf16[70,64,512]{2,1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[], s4[3]{0}, token[])"
    assert [(a.dtype, a.dims, a.bytes) for a in hlo.arrays(shape)] == [
        ("bf16", (70, 64, 512), 2 * 70 * 64 * 512),
        ("pred", (), 1),
        ("s4", (3,), 2),
        ("token", (), 0),
    ]


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule empty\n")
