// Opcode numbers of gfx90a, gfx942 and gfx950: vector formats. Numbers as in AMD's CDNA2, CDNA3 and
// CDNA4 documents; the decoder tests check them against the assembler.
#include "opcodes_gfx9.h"

namespace ark_emu {

const std::vector<OpcodeText> kGfx9Vector = {
    {Format::VOP1,
     R"(
0 v_nop v_mov_b32 v_readfirstlane_b32 v_cvt_i32_f64 v_cvt_f64_i32 v_cvt_f32_i32 v_cvt_f32_u32
v_cvt_u32_f32 v_cvt_i32_f32 10 v_cvt_f16_f32 v_cvt_f32_f16 v_cvt_rpi_i32_f32 v_cvt_flr_i32_f32
v_cvt_off_f32_i4 v_cvt_f32_f64 v_cvt_f64_f32 v_cvt_f32_ubyte0 v_cvt_f32_ubyte1 v_cvt_f32_ubyte2
v_cvt_f32_ubyte3 v_cvt_u32_f64 v_cvt_f64_u32 v_trunc_f64 v_ceil_f64 v_rndne_f64 v_floor_f64
v_fract_f32 v_trunc_f32 v_ceil_f32 v_rndne_f32 v_floor_f32 v_exp_f32 v_log_f32 v_rcp_f32
v_rcp_iflag_f32 v_rsq_f32 v_rcp_f64 v_rsq_f64 v_sqrt_f32 v_sqrt_f64 v_sin_f32 v_cos_f32
v_not_b32 v_bfrev_b32 v_ffbh_u32 v_ffbl_b32 v_ffbh_i32 v_frexp_exp_i32_f64 v_frexp_mant_f64
v_fract_f64 v_frexp_exp_i32_f32 v_frexp_mant_f32 v_clrexcp 56 v_mov_b64 v_cvt_f16_u16
v_cvt_f16_i16 v_cvt_u16_f16 v_cvt_i16_f16 v_rcp_f16 v_sqrt_f16 v_rsq_f16 v_log_f16 v_exp_f16
v_frexp_mant_f16 v_frexp_exp_i16_f16 v_floor_f16 v_ceil_f16 v_trunc_f16 v_rndne_f16 v_fract_f16
v_sin_f16 v_cos_f16 v_exp_legacy_f32 v_log_legacy_f32 v_cvt_norm_i16_f16 v_cvt_norm_u16_f16
v_sat_pk_u8_i16 81 v_swap_b32 v_accvgpr_mov_b32 84 v_cvt_f32_fp8 v_cvt_f32_bf8 v_cvt_pk_f32_fp8
v_cvt_pk_f32_bf8)"},
    {Format::VOP2,
     R"(
0 v_cndmask_b32 v_add_f32 v_sub_f32 v_subrev_f32 v_fmac_f64 v_mul_f32 v_mul_i32_i24
v_mul_hi_i32_i24 v_mul_u32_u24 v_mul_hi_u32_u24 v_min_f32 v_max_f32 v_min_i32 v_max_i32
v_min_u32 v_max_u32 v_lshrrev_b32 v_ashrrev_i32 v_lshlrev_b32 v_and_b32 v_or_b32 v_xor_b32
none v_fmamk_f32 v_fmaak_f32 v_add_co_u32 v_sub_co_u32 v_subrev_co_u32 v_addc_co_u32
v_subb_co_u32 v_subbrev_co_u32 v_add_f16 v_sub_f16 v_subrev_f16 v_mul_f16 v_mac_f16 v_madmk_f16
v_madak_f16 v_add_u16 v_sub_u16 v_subrev_u16 v_mul_lo_u16 v_lshlrev_b16 v_lshrrev_b16
v_ashrrev_i16 v_max_f16 v_min_f16 v_max_u16 v_max_i16 v_min_u16 v_min_i16 v_ldexp_f16 v_add_u32
v_sub_u32 v_subrev_u32 v_dot2c_f32_f16 v_dot2c_i32_i16 v_dot4c_i32_i8 v_dot8c_i32_i4 v_fmac_f32
v_pk_fmac_f16 v_xnor_b32)"},
    {Format::VOP3,
     R"(
450 v_mad_i32_i24 v_mad_u32_u24 v_cubeid_f32 v_cubesc_f32 v_cubetc_f32 v_cubema_f32 v_bfe_u32
v_bfe_i32 v_bfi_b32 v_fma_f32 v_fma_f64 v_lerp_u8 v_alignbit_b32 v_alignbyte_b32 v_min3_f32
v_min3_i32 v_min3_u32 v_max3_f32 v_max3_i32 v_max3_u32 v_med3_f32 v_med3_i32 v_med3_u32 v_sad_u8
v_sad_hi_u8 v_sad_u16 v_sad_u32 v_cvt_pk_u8_f32 v_div_fixup_f32 v_div_fixup_f64 v_div_scale_f32
v_div_scale_f64 v_div_fmas_f32 v_div_fmas_f64 v_msad_u8 v_qsad_pk_u16_u8 v_mqsad_pk_u16_u8
v_mqsad_u32_u8 v_mad_u64_u32 v_mad_i64_i32 v_mad_legacy_f16 v_mad_legacy_u16 v_mad_legacy_i16
v_perm_b32 v_fma_legacy_f16 v_div_fixup_legacy_f16 v_cvt_pkaccum_u8_f32 v_mad_u32_u16
v_mad_i32_i16 v_xad_u32 v_min3_f16 v_min3_i16 v_min3_u16 v_max3_f16 v_max3_i16 v_max3_u16
v_med3_f16 v_med3_i16 v_med3_u16 v_lshl_add_u32 v_add_lshl_u32 v_add3_u32 v_lshl_or_b32
v_and_or_b32 v_or3_b32 v_mad_f16 v_mad_u16 v_mad_i16 v_fma_f16 v_div_fixup_f16 v_lshl_add_u64
640 v_add_f64 v_mul_f64 v_min_f64
v_max_f64 v_ldexp_f64 v_mul_lo_u32 v_mul_hi_u32 v_mul_hi_i32 v_ldexp_f32 v_readlane_b32
v_writelane_b32 v_bcnt_u32_b32 v_mbcnt_lo_u32_b32 v_mbcnt_hi_u32_b32 655 v_lshlrev_b64
v_lshrrev_b64 v_ashrrev_i64 v_trig_preop_f64 v_bfm_b32 v_cvt_pknorm_i16_f32 v_cvt_pknorm_u16_f32
v_cvt_pkrtz_f16_f32 v_cvt_pk_u16_u32 v_cvt_pk_i16_i32 v_cvt_pknorm_i16_f16 v_cvt_pknorm_u16_f16
668 v_add_i32 v_sub_i32 v_add_i16 v_sub_i16 v_pack_b32_f16 v_mul_legacy_f32 v_cvt_pk_fp8_f32
v_cvt_pk_bf8_f32 v_cvt_sr_fp8_f32 v_cvt_sr_bf8_f32)"},
    {Format::VOP3P,
     R"(
0 v_pk_mad_i16 v_pk_mul_lo_u16 v_pk_add_i16 v_pk_sub_i16 v_pk_lshlrev_b16 v_pk_lshrrev_b16
v_pk_ashrrev_i16 v_pk_max_i16 v_pk_min_i16 v_pk_mad_u16 v_pk_add_u16 v_pk_sub_u16 v_pk_max_u16
v_pk_min_u16 v_pk_fma_f16 v_pk_add_f16 v_pk_mul_f16 v_pk_min_f16 v_pk_max_f16
32 v_fma_mix_f32 v_fma_mixlo_f16 v_fma_mixhi_f16
v_dot2_f32_f16 38 v_dot2_i32_i16 v_dot2_u32_u16 v_dot4_i32_i8 v_dot4_u32_u8 v_dot8_i32_i4
v_dot8_u32_u4 48 v_pk_fma_f32 v_pk_mul_f32 v_pk_add_f32 v_pk_mov_b32
62 v_mfma_f32_16x16x8_xf32 v_mfma_f32_32x32x4_xf32 v_mfma_f32_32x32x1_2b_f32
v_mfma_f32_16x16x1_4b_f32 v_mfma_f32_4x4x1_16b_f32 68 v_mfma_f32_32x32x2_f32
v_mfma_f32_16x16x4_f32 72 v_mfma_f32_32x32x4_2b_f16 v_mfma_f32_16x16x4_4b_f16
v_mfma_f32_4x4x4_16b_f16 76 v_mfma_f32_32x32x8_f16 v_mfma_f32_16x16x16_f16
80 v_mfma_i32_32x32x4_2b_i8 v_mfma_i32_16x16x4_4b_i8 v_mfma_i32_4x4x4_16b_i8
86 v_mfma_i32_32x32x16_i8 v_mfma_i32_16x16x32_i8
v_accvgpr_read_b32 v_accvgpr_write_b32 93 v_mfma_f32_32x32x4_2b_bf16 v_mfma_f32_16x16x4_4b_bf16
v_mfma_f32_4x4x4_16b_bf16 v_mfma_f32_32x32x8_bf16 v_mfma_f32_16x16x16_bf16
98 v_smfmac_f32_16x16x32_f16 100 v_smfmac_f32_32x32x16_f16 102 v_smfmac_f32_16x16x32_bf16
104 v_smfmac_f32_32x32x16_bf16 106 v_smfmac_i32_16x16x64_i8 108 v_smfmac_i32_32x32x32_i8
110 v_mfma_f64_16x16x4_f64 v_mfma_f64_4x4x4_4b_f64 v_mfma_f32_16x16x32_bf8_bf8
v_mfma_f32_16x16x32_bf8_fp8 v_mfma_f32_16x16x32_fp8_bf8 v_mfma_f32_16x16x32_fp8_fp8
v_mfma_f32_32x32x16_bf8_bf8 v_mfma_f32_32x32x16_bf8_fp8 v_mfma_f32_32x32x16_fp8_bf8
v_mfma_f32_32x32x16_fp8_fp8 v_smfmac_f32_16x16x64_bf8_bf8 v_smfmac_f32_16x16x64_bf8_fp8
v_smfmac_f32_16x16x64_fp8_bf8 v_smfmac_f32_16x16x64_fp8_fp8 v_smfmac_f32_32x32x32_bf8_bf8
v_smfmac_f32_32x32x32_bf8_fp8 v_smfmac_f32_32x32x32_fp8_bf8 v_smfmac_f32_32x32x32_fp8_fp8)"},
};

const std::vector<OpcodeText> kGfx9Compare = {
    {Format::VOPC,
     R"(
16 v_cmp_class_f32 v_cmpx_class_f32 v_cmp_class_f64 v_cmpx_class_f64 v_cmp_class_f16
v_cmpx_class_f16 32 v_cmp_f_f16 v_cmp_lt_f16 v_cmp_eq_f16 v_cmp_le_f16 v_cmp_gt_f16 v_cmp_lg_f16
v_cmp_ge_f16 v_cmp_o_f16 v_cmp_u_f16 v_cmp_nge_f16 v_cmp_nlg_f16 v_cmp_ngt_f16 v_cmp_nle_f16
v_cmp_neq_f16 v_cmp_nlt_f16 v_cmp_tru_f16 v_cmpx_f_f16 v_cmpx_lt_f16 v_cmpx_eq_f16 v_cmpx_le_f16
v_cmpx_gt_f16 v_cmpx_lg_f16 v_cmpx_ge_f16 v_cmpx_o_f16 v_cmpx_u_f16 v_cmpx_nge_f16
v_cmpx_nlg_f16 v_cmpx_ngt_f16 v_cmpx_nle_f16 v_cmpx_neq_f16 v_cmpx_nlt_f16 v_cmpx_tru_f16
v_cmp_f_f32 v_cmp_lt_f32 v_cmp_eq_f32 v_cmp_le_f32 v_cmp_gt_f32 v_cmp_lg_f32 v_cmp_ge_f32
v_cmp_o_f32 v_cmp_u_f32 v_cmp_nge_f32 v_cmp_nlg_f32 v_cmp_ngt_f32 v_cmp_nle_f32 v_cmp_neq_f32
v_cmp_nlt_f32 v_cmp_tru_f32 v_cmpx_f_f32 v_cmpx_lt_f32 v_cmpx_eq_f32 v_cmpx_le_f32 v_cmpx_gt_f32
v_cmpx_lg_f32 v_cmpx_ge_f32 v_cmpx_o_f32 v_cmpx_u_f32 v_cmpx_nge_f32 v_cmpx_nlg_f32
v_cmpx_ngt_f32 v_cmpx_nle_f32 v_cmpx_neq_f32 v_cmpx_nlt_f32 v_cmpx_tru_f32 v_cmp_f_f64
v_cmp_lt_f64 v_cmp_eq_f64 v_cmp_le_f64 v_cmp_gt_f64 v_cmp_lg_f64 v_cmp_ge_f64 v_cmp_o_f64
v_cmp_u_f64 v_cmp_nge_f64 v_cmp_nlg_f64 v_cmp_ngt_f64 v_cmp_nle_f64 v_cmp_neq_f64 v_cmp_nlt_f64
v_cmp_tru_f64 v_cmpx_f_f64 v_cmpx_lt_f64 v_cmpx_eq_f64 v_cmpx_le_f64 v_cmpx_gt_f64 v_cmpx_lg_f64
v_cmpx_ge_f64 v_cmpx_o_f64 v_cmpx_u_f64 v_cmpx_nge_f64 v_cmpx_nlg_f64 v_cmpx_ngt_f64
v_cmpx_nle_f64 v_cmpx_neq_f64 v_cmpx_nlt_f64 v_cmpx_tru_f64 160 v_cmp_f_i16 v_cmp_lt_i16
v_cmp_eq_i16 v_cmp_le_i16 v_cmp_gt_i16 v_cmp_ne_i16 v_cmp_ge_i16 v_cmp_t_i16 v_cmp_f_u16
v_cmp_lt_u16 v_cmp_eq_u16 v_cmp_le_u16 v_cmp_gt_u16 v_cmp_ne_u16 v_cmp_ge_u16 v_cmp_t_u16
v_cmpx_f_i16 v_cmpx_lt_i16 v_cmpx_eq_i16 v_cmpx_le_i16 v_cmpx_gt_i16 v_cmpx_ne_i16 v_cmpx_ge_i16
v_cmpx_t_i16 v_cmpx_f_u16 v_cmpx_lt_u16 v_cmpx_eq_u16 v_cmpx_le_u16 v_cmpx_gt_u16 v_cmpx_ne_u16
v_cmpx_ge_u16 v_cmpx_t_u16 v_cmp_f_i32 v_cmp_lt_i32 v_cmp_eq_i32 v_cmp_le_i32 v_cmp_gt_i32
v_cmp_ne_i32 v_cmp_ge_i32 v_cmp_t_i32 v_cmp_f_u32 v_cmp_lt_u32 v_cmp_eq_u32 v_cmp_le_u32
v_cmp_gt_u32 v_cmp_ne_u32 v_cmp_ge_u32 v_cmp_t_u32 v_cmpx_f_i32 v_cmpx_lt_i32 v_cmpx_eq_i32
v_cmpx_le_i32 v_cmpx_gt_i32 v_cmpx_ne_i32 v_cmpx_ge_i32 v_cmpx_t_i32 v_cmpx_f_u32 v_cmpx_lt_u32
v_cmpx_eq_u32 v_cmpx_le_u32 v_cmpx_gt_u32 v_cmpx_ne_u32 v_cmpx_ge_u32 v_cmpx_t_u32 v_cmp_f_i64
v_cmp_lt_i64 v_cmp_eq_i64 v_cmp_le_i64 v_cmp_gt_i64 v_cmp_ne_i64 v_cmp_ge_i64 v_cmp_t_i64
v_cmp_f_u64 v_cmp_lt_u64 v_cmp_eq_u64 v_cmp_le_u64 v_cmp_gt_u64 v_cmp_ne_u64 v_cmp_ge_u64
v_cmp_t_u64 v_cmpx_f_i64 v_cmpx_lt_i64 v_cmpx_eq_i64 v_cmpx_le_i64 v_cmpx_gt_i64 v_cmpx_ne_i64
v_cmpx_ge_i64 v_cmpx_t_i64 v_cmpx_f_u64 v_cmpx_lt_u64 v_cmpx_eq_u64 v_cmpx_le_u64 v_cmpx_gt_u64
v_cmpx_ne_u64 v_cmpx_ge_u64 v_cmpx_t_u64)"},
};

// Differences of gfx90a: MFMA has the numbers and names of the second generation, and there are no
// 8-bit floats.
const std::vector<OpcodeText> kGfx90aChanges = {
    {Format::VOP1, "56 none 84 none none none none"},
    {Format::VOP2, "22 v_mac_f32 v_madmk_f32 v_madak_f32"},
    {Format::VOP3, "449 v_mad_f32 520 none 674 none none none none"},
    {Format::VOP3P,
     R"(
62 none none
64 v_mfma_f32_32x32x1f32=v_mfma_f32_32x32x1_2b_f32 v_mfma_f32_16x16x1f32=v_mfma_f32_16x16x1_4b_f32
v_mfma_f32_4x4x1f32=v_mfma_f32_4x4x1_16b_f32
68 v_mfma_f32_32x32x2f32=v_mfma_f32_32x32x2_f32 v_mfma_f32_16x16x4f32=v_mfma_f32_16x16x4_f32
72 v_mfma_f32_32x32x4f16=v_mfma_f32_32x32x4_2b_f16 v_mfma_f32_16x16x4f16=v_mfma_f32_16x16x4_4b_f16
v_mfma_f32_4x4x4f16=v_mfma_f32_4x4x4_16b_f16
76 v_mfma_f32_32x32x8f16=v_mfma_f32_32x32x8_f16 v_mfma_f32_16x16x16f16=v_mfma_f32_16x16x16_f16
80 v_mfma_i32_32x32x4i8=v_mfma_i32_32x32x4_2b_i8 v_mfma_i32_16x16x4i8=v_mfma_i32_16x16x4_4b_i8
v_mfma_i32_4x4x4i8=v_mfma_i32_4x4x4_16b_i8
84 v_mfma_i32_32x32x8i8 v_mfma_i32_16x16x16i8 none none
93 none none none none none none
99 v_mfma_f32_32x32x4bf16_1k=v_mfma_f32_32x32x4_2b_bf16
v_mfma_f32_16x16x4bf16_1k=v_mfma_f32_16x16x4_4b_bf16
v_mfma_f32_4x4x4bf16_1k=v_mfma_f32_4x4x4_16b_bf16
v_mfma_f32_32x32x8bf16_1k=v_mfma_f32_32x32x8_bf16
v_mfma_f32_16x16x16bf16_1k=v_mfma_f32_16x16x16_bf16
v_mfma_f32_32x32x2bf16 v_mfma_f32_16x16x2bf16 none v_mfma_f32_4x4x2bf16 v_mfma_f32_32x32x4bf16
v_mfma_f32_16x16x8bf16
110 v_mfma_f64_16x16x4f64=v_mfma_f64_16x16x4_f64 v_mfma_f64_4x4x4f64=v_mfma_f64_4x4x4_4b_f64
112 none none none none none none none none none none none none none none none none)"},
    {Format::DS, "23 none none 183 none none"},
    {Format::FLAT, "77 none none 82 none"},
    {Format::GLOBAL, "38 none none none none none 82 none"},
    {Format::SCRATCH, "38 none none none none none"},
    {Format::MUBUF, "41 buffer_invl2 62 buffer_wbinvl1 buffer_wbinvl1_vol"},
};

// Differences of gfx950: formats of 6 and 4 bits, products with scales, deeper MFMA; no MFMA on
// xf32. A product with scales has the number of the product without them plus 128 (VOP3P 128 and
// up).
const std::vector<OpcodeText> kGfx950Changes = {
    {Format::VOP1, "88 v_prng_b32 v_permlane16_swap_b32 v_permlane32_swap_b32 v_cvt_f32_bf16"},
    {Format::VOP2, "22 v_dot2c_f32_bf16"},
    {Format::VOP3,
     R"(
563 v_bitop3_b16 v_bitop3_b32 v_cvt_scalef32_pk_fp8_f32 v_cvt_scalef32_pk_bf8_f32
v_cvt_scalef32_sr_fp8_f32 v_cvt_scalef32_sr_bf8_f32 v_cvt_scalef32_pk_f32_fp8
v_cvt_scalef32_pk_f32_bf8 v_cvt_scalef32_f32_fp8 v_cvt_scalef32_f32_bf8
v_cvt_scalef32_pk_fp4_f32 v_cvt_scalef32_sr_pk_fp4_f32 v_cvt_scalef32_pk_f32_fp4
v_cvt_scalef32_pk_fp8_f16 v_cvt_scalef32_pk_bf8_f16 v_cvt_scalef32_sr_fp8_f16
v_cvt_scalef32_sr_bf8_f16 v_cvt_scalef32_pk_fp8_bf16 v_cvt_scalef32_pk_bf8_bf16
v_cvt_scalef32_sr_fp8_bf16 v_cvt_scalef32_sr_bf8_bf16 v_cvt_scalef32_pk_f16_fp8
v_cvt_scalef32_pk_f16_bf8 v_cvt_scalef32_f16_fp8 v_cvt_scalef32_f16_bf8
v_cvt_scalef32_pk_fp4_f16 v_cvt_scalef32_pk_fp4_bf16 v_cvt_scalef32_sr_pk_fp4_f16
v_cvt_scalef32_sr_pk_fp4_bf16 v_cvt_scalef32_pk_f16_fp4 v_cvt_scalef32_pk_bf16_fp4
v_cvt_scalef32_2xpk16_fp6_f32 v_cvt_scalef32_2xpk16_bf6_f32 v_cvt_scalef32_sr_pk32_fp6_f32
v_cvt_scalef32_sr_pk32_bf6_f32 v_cvt_scalef32_pk32_f32_fp6 v_cvt_scalef32_pk32_f32_bf6
v_cvt_scalef32_pk32_fp6_f16 v_cvt_scalef32_pk32_fp6_bf16 v_cvt_scalef32_pk32_bf6_f16
v_cvt_scalef32_pk32_bf6_bf16 v_cvt_scalef32_sr_pk32_fp6_f16 v_cvt_scalef32_sr_pk32_fp6_bf16
v_cvt_scalef32_sr_pk32_bf6_f16 v_cvt_scalef32_sr_pk32_bf6_bf16 v_cvt_scalef32_pk32_f16_fp6
v_cvt_scalef32_pk32_bf16_fp6 v_cvt_scalef32_pk32_f16_bf6 v_cvt_scalef32_pk32_bf16_bf6
613 v_ashr_pk_i8_i32 v_ashr_pk_u8_i32 v_cvt_pk_f16_f32 v_cvt_pk_bf16_f32
v_cvt_scalef32_pk_bf16_fp8 v_cvt_scalef32_pk_bf16_bf8
678 v_cvt_sr_f16_f32 v_cvt_sr_bf16_f32 v_minimum3_f32 v_maximum3_f32)"},
    {Format::VOP3P,
     R"(
26 v_dot2_f32_bf16 v_pk_minimum3_f16 v_pk_maximum3_f16
44 v_mfma_ld_scale_b32 v_mfma_f32_16x16x128_f8f6f4 v_mfma_f32_32x32x64_f8f6f4
53 v_mfma_f32_16x16x32_bf16 v_mfma_i32_16x16x64_i8 v_mfma_f32_32x32x16_bf16 v_mfma_i32_32x32x32_i8
57 v_smfmac_f32_16x16x64_bf16 v_smfmac_i32_16x16x128_i8 v_smfmac_f32_16x16x128_bf8_bf8
v_smfmac_f32_16x16x128_bf8_fp8 v_smfmac_f32_16x16x128_fp8_bf8 62 none none
67 v_smfmac_f32_16x16x128_fp8_fp8 70 v_smfmac_f32_32x32x32_bf16 v_smfmac_i32_32x32x64_i8
75 v_smfmac_f32_32x32x64_bf8_bf8 78 v_smfmac_f32_32x32x64_bf8_fp8 v_smfmac_f32_32x32x64_fp8_bf8
83 v_smfmac_f32_32x32x64_fp8_fp8 v_mfma_f32_16x16x32_f16 v_mfma_f32_32x32x16_f16
90 v_smfmac_f32_16x16x64_f16 v_smfmac_f32_32x32x32_f16
173 v_mfma_scale_f32_16x16x128_f8f6f4 v_mfma_scale_f32_32x32x64_f8f6f4)"},
    {Format::DS, "224 ds_read_b64_tr_b4 ds_read_b96_tr_b6 ds_read_b64_tr_b8 ds_read_b64_tr_b16"},
    {Format::GLOBAL, "125 global_load_lds_dwordx4 global_load_lds_dwordx3"},
    {Format::MUBUF, "82 buffer_atomic_pk_add_bf16"},
};

}  // namespace ark_emu
