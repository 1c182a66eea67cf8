// Opcode numbers of gfx1100: vector formats. Numbers as in AMD's RDNA3 instruction set
// document; a name after "=" is the CDNA spelling that the operation is registered under. The decoder
// tests check them against the assembler.
#include "opcodes_gfx11.h"

namespace ark_emu {

const std::vector<OpcodeText> kGfx11Vector = {
    {Format::VOP1,
     R"(
0 v_nop v_mov_b32 v_readfirstlane_b32 v_cvt_i32_f64 v_cvt_f64_i32 v_cvt_f32_i32 v_cvt_f32_u32
v_cvt_u32_f32 v_cvt_i32_f32 10 v_cvt_f16_f32 v_cvt_f32_f16 v_cvt_nearest_i32_f32=v_cvt_rpi_i32_f32
v_cvt_floor_i32_f32=v_cvt_flr_i32_f32 v_cvt_off_f32_i4 v_cvt_f32_f64 v_cvt_f64_f32
v_cvt_f32_ubyte0 v_cvt_f32_ubyte1 v_cvt_f32_ubyte2 v_cvt_f32_ubyte3 v_cvt_u32_f64 v_cvt_f64_u32
v_trunc_f64 v_ceil_f64 v_rndne_f64 v_floor_f64 v_pipeflush v_mov_b16 32 v_fract_f32 v_trunc_f32
v_ceil_f32 v_rndne_f32 v_floor_f32 v_exp_f32 39 v_log_f32 42 v_rcp_f32 v_rcp_iflag_f32 46
v_rsq_f32 v_rcp_f64 49 v_rsq_f64 51 v_sqrt_f32 v_sqrt_f64 v_sin_f32 v_cos_f32 v_not_b32
v_bfrev_b32 v_clz_i32_u32=v_ffbh_u32 v_ctz_i32_b32=v_ffbl_b32 v_cls_i32=v_ffbh_i32
v_frexp_exp_i32_f64 v_frexp_mant_f64 v_fract_f64 v_frexp_exp_i32_f32 v_frexp_mant_f32 66
v_movreld_b32 v_movrels_b32 v_movrelsd_b32 72 v_movrelsd_2_b32 80 v_cvt_f16_u16 v_cvt_f16_i16
v_cvt_u16_f16 v_cvt_i16_f16 v_rcp_f16 v_sqrt_f16 v_rsq_f16 v_log_f16 v_exp_f16 v_frexp_mant_f16
v_frexp_exp_i16_f16 v_floor_f16 v_ceil_f16 v_trunc_f16 v_rndne_f16 v_fract_f16 v_sin_f16 v_cos_f16
v_sat_pk_u8_i16 v_cvt_norm_i16_f16 v_cvt_norm_u16_f16 v_swap_b32 v_swap_b16 v_permlane64_b32
v_swaprel_b32 v_not_b16 v_cvt_i32_i16 v_cvt_u32_u16)"},
    {Format::VOP2,
     R"(
1 v_cndmask_b32 v_dot2acc_f32_f16=v_dot2c_f32_f16 v_add_f32 v_sub_f32 v_subrev_f32
v_fmac_dx9_zero_f32 v_mul_dx9_zero_f32=v_mul_legacy_f32 v_mul_f32 v_mul_i32_i24 v_mul_hi_i32_i24
v_mul_u32_u24 v_mul_hi_u32_u24 15 v_min_f32 v_max_f32 v_min_i32 v_max_i32 v_min_u32 v_max_u32 24
v_lshlrev_b32 v_lshrrev_b32 v_ashrrev_i32 v_and_b32 v_or_b32 v_xor_b32 v_xnor_b32 32
v_add_co_ci_u32=v_addc_co_u32 v_sub_co_ci_u32=v_subb_co_u32 v_subrev_co_ci_u32=v_subbrev_co_u32 37
v_add_nc_u32=v_add_u32 v_sub_nc_u32=v_sub_u32 v_subrev_nc_u32=v_subrev_u32 43 v_fmac_f32
v_fmamk_f32 v_fmaak_f32 47 v_cvt_pk_rtz_f16_f32=v_cvt_pkrtz_f16_f32 50 v_add_f16 v_sub_f16
v_subrev_f16 v_mul_f16 v_fmac_f16 v_fmamk_f16 v_fmaak_f16 v_max_f16 v_min_f16 v_ldexp_f16
v_pk_fmac_f16)"},
    {Format::VOP3,
     R"(
521 v_fma_dx9_zero_f32 v_mad_i32_i24 v_mad_u32_u24 v_cubeid_f32 v_cubesc_f32 v_cubetc_f32
v_cubema_f32 v_bfe_u32 v_bfe_i32 v_bfi_b32 v_fma_f32 v_fma_f64 v_lerp_u8 v_alignbit_b32
v_alignbyte_b32 v_mullit_f32 v_min3_f32 v_min3_i32 v_min3_u32 v_max3_f32 v_max3_i32 v_max3_u32
v_med3_f32 v_med3_i32 v_med3_u32 v_sad_u8 v_sad_hi_u8 v_sad_u16 v_sad_u32 v_cvt_pk_u8_f32
v_div_fixup_f32 v_div_fixup_f64 567 v_div_fmas_f32 v_div_fmas_f64 v_msad_u8 v_qsad_pk_u16_u8
v_mqsad_pk_u16_u8 573 v_mqsad_u32_u8 576 v_xor3_b32 v_mad_u16 580 v_perm_b32 v_xad_u32
v_lshl_add_u32 v_add_lshl_u32 v_fma_f16 v_min3_f16 v_min3_i16 v_min3_u16 v_max3_f16 v_max3_i16
v_max3_u16 v_med3_f16 v_med3_i16 v_med3_u16 595 v_mad_i16 v_div_fixup_f16 v_add3_u32 v_lshl_or_b32
v_and_or_b32 v_or3_b32 v_mad_u32_u16 v_mad_i32_i16 v_permlane16_b32 v_permlanex16_b32
v_cndmask_b16 v_maxmin_f32 v_minmax_f32 v_maxmin_f16 v_minmax_f16 v_maxmin_u32 v_minmax_u32
v_maxmin_i32 v_minmax_i32 v_dot2_f16_f16 v_dot2_bf16_bf16 764 v_div_scale_f32 v_div_scale_f64
v_mad_u64_u32 v_mad_i64_i32 v_add_co_u32 v_sub_co_u32 v_subrev_co_u32 v_add_nc_u16=v_add_u16
v_sub_nc_u16=v_sub_u16 v_mul_lo_u16 v_cvt_pk_i16_f32 v_cvt_pk_u16_f32 777 v_max_u16 v_max_i16
v_min_u16 v_min_i16 v_add_nc_i16=v_add_i16 v_sub_nc_i16=v_sub_i16 785 v_pack_b32_f16
v_cvt_pk_norm_i16_f16=v_cvt_pknorm_i16_f16 v_cvt_pk_norm_u16_f16=v_cvt_pknorm_u16_f16 796
v_ldexp_f32 v_bfm_b32 v_bcnt_u32_b32 v_mbcnt_lo_u32_b32 v_mbcnt_hi_u32_b32
v_cvt_pk_norm_i16_f32=v_cvt_pknorm_i16_f32 v_cvt_pk_norm_u16_f32=v_cvt_pknorm_u16_f32
v_cvt_pk_u16_u32 v_cvt_pk_i16_i32 v_sub_nc_i32=v_sub_i32 v_add_nc_i32=v_add_i32 v_add_f64
v_mul_f64 v_min_f64 v_max_f64 v_ldexp_f64 v_mul_lo_u32 v_mul_hi_u32 v_mul_hi_i32 v_trig_preop_f64
824 v_lshlrev_b16 v_lshrrev_b16 v_ashrrev_i16 828 v_lshlrev_b64 v_lshrrev_b64 v_ashrrev_i64 864
v_readlane_b32 v_writelane_b32 v_and_b16 v_or_b16 v_xor_b16)"},
    {Format::VOP3P,
     R"(
0 v_pk_mad_i16 v_pk_mul_lo_u16 v_pk_add_i16 v_pk_sub_i16 v_pk_lshlrev_b16 v_pk_lshrrev_b16
v_pk_ashrrev_i16 v_pk_max_i16 v_pk_min_i16 v_pk_mad_u16 v_pk_add_u16 v_pk_sub_u16 v_pk_max_u16
v_pk_min_u16 v_pk_fma_f16 v_pk_add_f16 v_pk_mul_f16 v_pk_min_f16 v_pk_max_f16 v_dot2_f32_f16 22
v_dot4_i32_iu8 v_dot4_u32_u8 v_dot8_i32_iu4 v_dot8_u32_u4 v_dot2_f32_bf16 32 v_fma_mix_f32
v_fma_mixlo_f16 v_fma_mixhi_f16 64 v_wmma_f32_16x16x16_f16 v_wmma_f32_16x16x16_bf16
v_wmma_f16_16x16x16_f16 v_wmma_bf16_16x16x16_bf16 v_wmma_i32_16x16x16_iu8 v_wmma_i32_16x16x16_iu4)"},
    {Format::VOPD,
     R"(
0 v_dual_fmac_f32 v_dual_fmaak_f32 v_dual_fmamk_f32 v_dual_mul_f32 v_dual_add_f32 v_dual_sub_f32
v_dual_subrev_f32 v_dual_mul_dx9_zero_f32 v_dual_mov_b32 v_dual_cndmask_b32 v_dual_max_f32
v_dual_min_f32 v_dual_dot2acc_f32_f16 v_dual_dot2acc_f32_bf16 16 v_dual_add_nc_u32
v_dual_lshlrev_b32 v_dual_and_b32)"},
};

const std::vector<OpcodeText> kGfx11Compare = {
    {Format::VOPC,
     R"(
0 v_cmp_f_f16 v_cmp_lt_f16 v_cmp_eq_f16 v_cmp_le_f16 v_cmp_gt_f16 v_cmp_lg_f16 v_cmp_ge_f16
v_cmp_o_f16 v_cmp_u_f16 v_cmp_nge_f16 v_cmp_nlg_f16 v_cmp_ngt_f16 v_cmp_nle_f16 v_cmp_neq_f16
v_cmp_nlt_f16 v_cmp_t_f16=v_cmp_tru_f16 v_cmp_f_f32 v_cmp_lt_f32 v_cmp_eq_f32 v_cmp_le_f32
v_cmp_gt_f32 v_cmp_lg_f32 v_cmp_ge_f32 v_cmp_o_f32 v_cmp_u_f32 v_cmp_nge_f32 v_cmp_nlg_f32
v_cmp_ngt_f32 v_cmp_nle_f32 v_cmp_neq_f32 v_cmp_nlt_f32 v_cmp_t_f32=v_cmp_tru_f32 v_cmp_f_f64
v_cmp_lt_f64 v_cmp_eq_f64 v_cmp_le_f64 v_cmp_gt_f64 v_cmp_lg_f64 v_cmp_ge_f64 v_cmp_o_f64
v_cmp_u_f64 v_cmp_nge_f64 v_cmp_nlg_f64 v_cmp_ngt_f64 v_cmp_nle_f64 v_cmp_neq_f64 v_cmp_nlt_f64
v_cmp_t_f64=v_cmp_tru_f64 49 v_cmp_lt_i16 v_cmp_eq_i16 v_cmp_le_i16 v_cmp_gt_i16 v_cmp_ne_i16
v_cmp_ge_i16 57 v_cmp_lt_u16 v_cmp_eq_u16 v_cmp_le_u16 v_cmp_gt_u16 v_cmp_ne_u16 v_cmp_ge_u16 64
v_cmp_f_i32 v_cmp_lt_i32 v_cmp_eq_i32 v_cmp_le_i32 v_cmp_gt_i32 v_cmp_ne_i32 v_cmp_ge_i32
v_cmp_t_i32 v_cmp_f_u32 v_cmp_lt_u32 v_cmp_eq_u32 v_cmp_le_u32 v_cmp_gt_u32 v_cmp_ne_u32
v_cmp_ge_u32 v_cmp_t_u32 v_cmp_f_i64 v_cmp_lt_i64 v_cmp_eq_i64 v_cmp_le_i64 v_cmp_gt_i64
v_cmp_ne_i64 v_cmp_ge_i64 v_cmp_t_i64 v_cmp_f_u64 v_cmp_lt_u64 v_cmp_eq_u64 v_cmp_le_u64
v_cmp_gt_u64 v_cmp_ne_u64 v_cmp_ge_u64 v_cmp_t_u64 125 v_cmp_class_f16 v_cmp_class_f32
v_cmp_class_f64 v_cmpx_f_f16 v_cmpx_lt_f16 v_cmpx_eq_f16 v_cmpx_le_f16 v_cmpx_gt_f16 v_cmpx_lg_f16
v_cmpx_ge_f16 v_cmpx_o_f16 v_cmpx_u_f16 v_cmpx_nge_f16 v_cmpx_nlg_f16 v_cmpx_ngt_f16
v_cmpx_nle_f16 v_cmpx_neq_f16 v_cmpx_nlt_f16 v_cmpx_t_f16=v_cmpx_tru_f16 v_cmpx_f_f32
v_cmpx_lt_f32 v_cmpx_eq_f32 v_cmpx_le_f32 v_cmpx_gt_f32 v_cmpx_lg_f32 v_cmpx_ge_f32 v_cmpx_o_f32
v_cmpx_u_f32 v_cmpx_nge_f32 v_cmpx_nlg_f32 v_cmpx_ngt_f32 v_cmpx_nle_f32 v_cmpx_neq_f32
v_cmpx_nlt_f32 v_cmpx_t_f32=v_cmpx_tru_f32 v_cmpx_f_f64 v_cmpx_lt_f64 v_cmpx_eq_f64 v_cmpx_le_f64
v_cmpx_gt_f64 v_cmpx_lg_f64 v_cmpx_ge_f64 v_cmpx_o_f64 v_cmpx_u_f64 v_cmpx_nge_f64 v_cmpx_nlg_f64
v_cmpx_ngt_f64 v_cmpx_nle_f64 v_cmpx_neq_f64 v_cmpx_nlt_f64 v_cmpx_t_f64=v_cmpx_tru_f64 177
v_cmpx_lt_i16 v_cmpx_eq_i16 v_cmpx_le_i16 v_cmpx_gt_i16 v_cmpx_ne_i16 v_cmpx_ge_i16 185
v_cmpx_lt_u16 v_cmpx_eq_u16 v_cmpx_le_u16 v_cmpx_gt_u16 v_cmpx_ne_u16 v_cmpx_ge_u16 192
v_cmpx_f_i32 v_cmpx_lt_i32 v_cmpx_eq_i32 v_cmpx_le_i32 v_cmpx_gt_i32 v_cmpx_ne_i32 v_cmpx_ge_i32
v_cmpx_t_i32 v_cmpx_f_u32 v_cmpx_lt_u32 v_cmpx_eq_u32 v_cmpx_le_u32 v_cmpx_gt_u32 v_cmpx_ne_u32
v_cmpx_ge_u32 v_cmpx_t_u32 v_cmpx_f_i64 v_cmpx_lt_i64 v_cmpx_eq_i64 v_cmpx_le_i64 v_cmpx_gt_i64
v_cmpx_ne_i64 v_cmpx_ge_i64 v_cmpx_t_i64 v_cmpx_f_u64 v_cmpx_lt_u64 v_cmpx_eq_u64 v_cmpx_le_u64
v_cmpx_gt_u64 v_cmpx_ne_u64 v_cmpx_ge_u64 v_cmpx_t_u64 253 v_cmpx_class_f16 v_cmpx_class_f32
v_cmpx_class_f64)"},
};

}  // namespace ark_emu
