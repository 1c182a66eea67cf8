// The operand stream of backends on which tasks read operands in place. A stage is an address;
// nothing is copied, and no wait is needed. Stages are assigned to warps in turn.

ARK_DEVICE bool ark_stage_mine(const ArkCtx& c, ark_u32 stage) {
  return (c.stage_base + stage) % ARK_WARPS == static_cast<ark_u32>(ark_warp());
}
ARK_DEVICE const char* ark_stage(ArkCtx& c, ark_u32 stage) {
  return ARK_POINTER(const char, ark_fetch(c, stage).address);
}
ARK_DEVICE void ark_stage_done(ArkCtx&, ark_u32) {}
