"""`benchmarks.step_profile` puts every operation where it belongs."""

import pytest

from benchmarks.step_profile import kind_of, medians, operations, part_of, torch_kind_of

PATH = "jit(step)/jvp(PixelDiT)/PixelDiT.blocks/"


@pytest.mark.parametrize("name, origin, part, kind", [
    ("dot.3", PATH + "_patch_path/feed-forward/dot_general",
     "patch blocks, feed-forward, forward", "products"),
    ("ynn_fusion.7", "jit(step)/transpose(jvp(PixelDiT))/_pixel_path/modulations/dot_general",
     "pixel blocks, modulations, backward", "products"),
    ("dot.4", PATH + "_patch_path/attention/dot_general",
     "patch blocks, attention, forward", "attention"),
    ("add_fusion", PATH + "_pixel_path/add", "pixel blocks, the rest, forward",
     "everything else"),
    ("dot.1", "jit(step)/jvp(PixelDiT)/embed/dot_general", "embeddings, forward", "products"),
    ("add_select_fusion", "jit(step)/select_n", "optimizer and average", "optimizer and average"),
])
def test_ours(name, origin, part, kind):
    assert part_of(origin) == part
    assert kind_of(name, origin) == kind


@pytest.mark.parametrize("name, kind", [
    ("aten::mm", "products"), ("aten::addmm", "products"), ("aten::bmm", "products"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
    ("aten::_fused_adamw_", "optimizer and average"), ("aten::lerp_", "optimizer and average"),
    ("aten::linalg_vector_norm", "optimizer and average"), ("aten::mul", "everything else"),
    ("graph_0_cpp_fused_add_cat_gelu_mul_3", "everything else"),
])
def test_pytorch(name, kind):
    assert torch_kind_of(name) == kind


def test_operations_are_read_from_a_compiled_program():
    text = """ENTRY %main {
  %dot.3 = f32[4,4]{1,0} dot(%a, %b), metadata={op_name="jit(f)/dot_general" stack_frame_id=1}
  ROOT %copy.1 = f32[4,4]{0,1} copy(%dot.3)
}"""
    assert operations(text) == {"dot.3": "jit(f)/dot_general", "copy.1": ""}


def test_medians_count_what_a_trace_lacks_as_nothing():
    assert medians([{"a": 1.0, "b": 3.0}, {"a": 3.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}
