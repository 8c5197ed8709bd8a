"""Totals read from HLO text, on small programs written out here."""

import textwrap

from pid_jax.parallel import hlo

PROGRAM = textwrap.dedent('''\
    HloModule jit_step, is_scheduled=true

    %add (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0)
      %b = f32[] parameter(1)
      ROOT %sum = f32[] add(%a, %b)
    }

    %piece_1 (p: bf16[8,64]) -> bf16[32,64] {
      %p = bf16[8,64]{1,0} parameter(0)
      ROOT %ag.1 = bf16[32,64]{1,0:T(8,128)} all-gather(%p), replica_groups={{0,1,2,3}}, \
dimensions={0}, frontend_attributes={chain_id="0"}
    }

    %piece_2 (p.2: bf16[8,64]) -> bf16[32,64] {
      %p.2 = bf16[8,64]{1,0} parameter(0)
      ROOT %ag.2 = bf16[32,64]{1,0:T(8,128)} all-gather(%p.2), replica_groups={{0,1,2,3}}, \
dimensions={0}, frontend_attributes={chain_id="0"}
    }

    %condition (s: (s32[], bf16[8,64])) -> pred[] {
      %limit = s32[]{:T(128)} constant(14)
      %s = (s32[], bf16[8,64]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%s), index=0
      ROOT %less = pred[] compare(%i, %limit), direction=LT
    }

    %body (s.1: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
      %s.1 = (s32[], bf16[8,64]{1,0}) parameter(0)
      %x = bf16[8,64]{1,0} get-tuple-element(%s.1), index=1
      %f.1 = bf16[32,64]{1,0} fusion(%x), kind=kCustom, calls=%piece_1, \
backend_config={"estimated_cycles":"100"}
      %f.2 = bf16[32,64]{1,0} fusion(%x), kind=kCustom, calls=%piece_2, \
backend_config={"estimated_cycles":"10"}
      %copy.3 = bf16[8,64]{0,1} copy(%x), backend_config={"estimated_cycles":"5"}
      %attend.2 = bf16[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
      ROOT %t = (s32[], bf16[8,64]{1,0}) tuple(%x, %x)
    }

    ENTRY %main (q: bf16[8,64]) -> f32[4] {
      %q = bf16[8,64]{1,0} parameter(0)
      %loop = (s32[], bf16[8,64]{1,0}) while(%q), condition=%condition, body=%body
      %rs = f32[4]{0} reduce-scatter(%q), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
      %ags = (bf16[8,2]{1,0}, bf16[32,2]{1,0}, u32[]) all-gather-start(%q), dimensions={0}
      %agd = bf16[32,2]{1,0} all-gather-done(%ags)
      ROOT %ar = f32[4]{0} all-reduce(%rs), to_apply=%add, backend_config={"estimated_cycles":"7"}
    }
    ''')


def test_loops_chains_and_collectives():
    found = hlo.summarise(PROGRAM)
    assert found.collectives == {"all-gather": 14 * 32 * 64 * 2 + 32 * 2 * 2,
                                 "reduce-scatter": 4 * 4 * 4, "all-reduce": 16}
    assert found.collective_calls == {"all-gather": 15, "reduce-scatter": 1, "all-reduce": 1}
    assert (found.cycles, found.copy_cycles) == (14 * 115 + 7, 14 * 5)
    assert found.kernels == {"attend": 14}
    assert found.unknown_loops == 0


def test_loop_of_unknown_length_is_reported():
    found = hlo.summarise(PROGRAM.replace("constant(14)", "parameter(1)"))
    assert found.unknown_loops == 1
    assert found.kernels == {"attend": 1}


def test_stated_trip_count_is_used():
    stated = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":'
                                           '{"n":"3"}}')
    assert hlo.summarise(stated).kernels == {"attend": 3}
