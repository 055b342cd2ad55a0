from mogrifier_jax.preflight import hlo, instruction_costs

FUSED = """
HloModule fused

%step (w: bf16[256,256], xs: bf16[70,64,256], i: s32[], ys: bf16[70,64,256]) -> bf16[70,64,256] {
  %w = bf16[256,256]{1,0} parameter(0)
  %xs = bf16[70,64,256]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %ys = bf16[70,64,256]{2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %x = bf16[1,64,256]{2,1,0} dynamic-slice(%xs, %i, %zero, %zero), dynamic_slice_sizes={1,64,256}
  %rows = bf16[64,256]{1,0} bitcast(%x)
  %dot = bf16[64,256]{1,0} dot(%rows, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %y = bf16[1,64,256]{2,1,0} bitcast(%dot)
  ROOT %out = bf16[70,64,256]{2,1,0} dynamic-update-slice(%ys, %y, %i, %zero, %zero)
}

ENTRY %main (w.1: bf16[256,256], x.1: bf16[70,64,256], i.1: s32[], y.1: bf16[70,64,256]) -> f32[4] {
  %w.1 = bf16[256,256]{1,0} parameter(0)
  %x.1 = bf16[70,64,256]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %y.1 = bf16[70,64,256]{2,1,0} parameter(3)
  %f = bf16[70,64,256]{2,1,0} fusion(%w.1, %x.1, %i.1, %y.1), kind=kCustom, calls=%step
  %lib = (f32[64,8]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %a = f32[64,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %b = f32[128,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %r = f32[4]{0} iota(), iota_dimension=0
}
"""


def test_a_fusion_moves_only_what_it_touches():
    module = hlo.parse(FUSED)
    fusion = module.entry.instructions["f"]
    window = 64 * 256 * 2
    assert (
        instruction_costs.traffic(module, module.entry, fusion)
        == 256 * 256 * 2 + window + 4 + window
    )
    assert instruction_costs.dots(module, module.entry, fusion) == [(2 * 64 * 256 * 256, False)]


def test_library_matmuls_count():
    module = hlo.parse(FUSED)
    call = module.entry.instructions["lib"]
    assert instruction_costs.dots(module, module.entry, call) == [(2 * 64 * 8 * 128, True)]
    assert (
        instruction_costs.traffic(module, module.entry, call)
        == 4 * (64 * 8 + 64 * 128 + 128 * 8) + 64
    )
    assert instruction_costs.traffic(module, module.entry, module.entry.instructions["a"]) == 0
