// Opcode numbers of gfx1100: scalar formats. Numbers as in AMD's RDNA3 instruction set
// document; a name after "=" is the CDNA spelling that the operation is registered under. The
// decoder tests check them against the assembler.
#include "opcodes_gfx11.h"

namespace ark_emu {

const std::vector<OpcodeText> kGfx11Scalar = {
    {Format::SOP1,
     R"(
0 s_mov_b32 s_mov_b64 s_cmov_b32 s_cmov_b64 s_brev_b32 s_brev_b64 8 s_ctz_i32_b32=s_ff1_i32_b32
s_ctz_i32_b64=s_ff1_i32_b64 s_clz_i32_u32=s_flbit_i32_b32 s_clz_i32_u64=s_flbit_i32_b64
s_cls_i32=s_flbit_i32 s_cls_i32_i64=s_flbit_i32_i64 s_sext_i32_i8 s_sext_i32_i16 s_bitset0_b32
s_bitset0_b64 s_bitset1_b32 s_bitset1_b64 s_bitreplicate_b64_b32 s_abs_i32 s_bcnt0_i32_b32
s_bcnt0_i32_b64 s_bcnt1_i32_b32 s_bcnt1_i32_b64 s_quadmask_b32 s_quadmask_b64 s_wqm_b32 s_wqm_b64
s_not_b32 s_not_b64 s_and_saveexec_b32 s_and_saveexec_b64 s_or_saveexec_b32 s_or_saveexec_b64
s_xor_saveexec_b32 s_xor_saveexec_b64 s_nand_saveexec_b32 s_nand_saveexec_b64 s_nor_saveexec_b32
s_nor_saveexec_b64 s_xnor_saveexec_b32 s_xnor_saveexec_b64
s_and_not0_saveexec_b32=s_andn1_saveexec_b32 s_and_not0_saveexec_b64=s_andn1_saveexec_b64
s_or_not0_saveexec_b32=s_orn1_saveexec_b32 s_or_not0_saveexec_b64=s_orn1_saveexec_b64
s_and_not1_saveexec_b32=s_andn2_saveexec_b32 s_and_not1_saveexec_b64=s_andn2_saveexec_b64
s_or_not1_saveexec_b32=s_orn2_saveexec_b32 s_or_not1_saveexec_b64=s_orn2_saveexec_b64
s_and_not0_wrexec_b32=s_andn1_wrexec_b32 s_and_not0_wrexec_b64=s_andn1_wrexec_b64
s_and_not1_wrexec_b32=s_andn2_wrexec_b32 s_and_not1_wrexec_b64=s_andn2_wrexec_b64 64 s_movrels_b32
s_movrels_b64 s_movreld_b32 s_movreld_b64 s_movrelsd_2_b32 71 s_getpc_b64 s_setpc_b64 s_swappc_b64
76 s_sendmsg_rtn_b32 s_sendmsg_rtn_b64)"},
    {Format::SOP2,
     R"(
0 s_add_u32 s_sub_u32 s_add_i32 s_sub_i32 s_addc_u32 s_subb_u32 s_absdiff_i32 8 s_lshl_b32
s_lshl_b64 s_lshr_b32 s_lshr_b64 s_ashr_i32 s_ashr_i64 s_lshl1_add_u32 s_lshl2_add_u32
s_lshl3_add_u32 s_lshl4_add_u32 s_min_i32 s_min_u32 s_max_i32 s_max_u32 s_and_b32 s_and_b64
s_or_b32 s_or_b64 s_xor_b32 s_xor_b64 s_nand_b32 s_nand_b64 s_nor_b32 s_nor_b64 s_xnor_b32
s_xnor_b64 s_and_not1_b32=s_andn2_b32 s_and_not1_b64=s_andn2_b64 s_or_not1_b32=s_orn2_b32
s_or_not1_b64=s_orn2_b64 s_bfe_u32 s_bfe_i32 s_bfe_u64 s_bfe_i64 s_bfm_b32 s_bfm_b64 s_mul_i32
s_mul_hi_u32 s_mul_hi_i32 48 s_cselect_b32 s_cselect_b64 s_pack_ll_b32_b16 s_pack_lh_b32_b16
s_pack_hh_b32_b16 s_pack_hl_b32_b16)"},
    {Format::SOPC,
     R"(
0 s_cmp_eq_i32 s_cmp_lg_i32 s_cmp_gt_i32 s_cmp_ge_i32 s_cmp_lt_i32 s_cmp_le_i32 s_cmp_eq_u32
s_cmp_lg_u32 s_cmp_gt_u32 s_cmp_ge_u32 s_cmp_lt_u32 s_cmp_le_u32 s_bitcmp0_b32 s_bitcmp1_b32
s_bitcmp0_b64 s_bitcmp1_b64 s_cmp_eq_u64 s_cmp_lg_u64)"},
    {Format::SOPK,
     R"(
0 s_movk_i32 2 s_cmovk_i32 s_cmpk_eq_i32 s_cmpk_lg_i32 s_cmpk_gt_i32 s_cmpk_ge_i32 s_cmpk_lt_i32
s_cmpk_le_i32 s_cmpk_eq_u32 s_cmpk_lg_u32 s_cmpk_gt_u32 s_cmpk_ge_u32 s_cmpk_lt_u32 s_cmpk_le_u32
s_addk_i32 s_mulk_i32 s_getreg_b32 s_setreg_b32 s_setreg_imm32_b32 s_call_b64 24 s_waitcnt_vscnt
s_waitcnt_vmcnt s_waitcnt_expcnt s_waitcnt_lgkmcnt)"},
    {Format::SOPP,
     R"(
0 s_nop s_setkill s_sethalt s_sleep s_set_inst_prefetch_distance s_clause 7 s_delay_alu
s_waitcnt_depctr s_waitcnt s_wait_idle s_wait_event 16 s_trap s_round_mode s_denorm_mode 31
s_code_end s_branch s_cbranch_scc0 s_cbranch_scc1 s_cbranch_vccz s_cbranch_vccnz s_cbranch_execz
s_cbranch_execnz s_cbranch_cdbgsys s_cbranch_cdbguser s_cbranch_cdbgsys_or_user
s_cbranch_cdbgsys_and_user 48 s_endpgm 52 s_wakeup s_setprio s_sendmsg s_sendmsghalt
s_incperflevel s_decperflevel s_ttracedata s_ttracedata_imm s_icache_inv s_barrier)"},
    {Format::SMEM,
     R"(
0 s_load_b32=s_load_dword s_load_b64=s_load_dwordx2 s_load_b128=s_load_dwordx4
s_load_b256=s_load_dwordx8 s_load_b512=s_load_dwordx16 8 s_buffer_load_b32=s_buffer_load_dword
s_buffer_load_b64=s_buffer_load_dwordx2 s_buffer_load_b128=s_buffer_load_dwordx4
s_buffer_load_b256=s_buffer_load_dwordx8 s_buffer_load_b512=s_buffer_load_dwordx16 32 s_gl1_inv
s_dcache_inv)"},
};

}  // namespace ark_emu
