// One wave's architectural state, and the functions with which handlers read sources and write
// results.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "engine.h"
#include "inst.h"
#include "rows.h"

namespace ark_emu {

struct Grid;
struct Workgroup;
struct PollLog;
struct WaveChecks;
struct StaleWave;
struct WaveTiming;

// The exception that handlers throw for a fault of the kernel. The grid turns it into a
// LaunchResult.
struct Fault {
  ErrorKind kind;
  std::string message;
  int lane = -1;
  uint64_t address = 0;
};

enum class WaveStatus : uint8_t { Ready, Barrier, Done };

struct Wave {
  // The scalar registers by hardware number: VCC is 106, EXEC 126, and so on. In a wave of 64 lanes
  // a lane mask has two registers. RDNA code may use the last register alone for a lane mask. A
  // handler that reads a pair then reads one register more, so the array has one more.
  alignas(64) uint32_t s[130] = {};
  uint32_t* v = nullptr;                // rows of kLanes; row = Operand::reg (AGPRs from 256)
  uint32_t pc = 0;                      // dword index of the next instruction
  bool scc = false;
  WaveStatus status = WaveStatus::Ready;
  int32_t slice = 0;                    // instructions left in this slice; 0 ends it
  bool sleeps = false;                  // s_sleep ended the slice
  uint32_t naps = 0;                    // consecutive short slices that s_sleep ended
  bool default_mode = true;             // MODE has round-to-nearest and all denormals on
  uint32_t mode = 0xf0;                 // MODE: round 1:0 f32, 3:2 f64/f16; denormals 5:4, 7:6
  int lanes = 64;                       // wave size
  uint64_t full = ~0ull;                // EXEC with all lanes of the wave size on
  unsigned m0_reg = 124;
  bool gpr_index = false;               // s_set_gpr_idx_on: v_mov_b32's registers are moved by M0
  bool keep_high16 = false;             // RDNA3: a 16-bit result leaves the other half alone
  uint32_t id = 0;                      // within the grid
  uint32_t id_in_group = 0;
  Workgroup* group = nullptr;
  Grid* grid = nullptr;
  uint8_t* scratch = nullptr;           // this wave's private memory, dword-interleaved by lane
  uint64_t scratch_size = 0;            // bytes for all lanes
  WaveTiming* timing = nullptr;         // null without a timing model
  WaveChecks* checks = nullptr;         // null when checks are off
  StaleWave* stale = nullptr;           // null unless values may be stale
  PollLog* watched = nullptr;           // set while the wave is watched for a deadlock
  uint64_t executed = 0;
  bool changed = false;                 // this slice changed memory: other waves may continue

  uint64_t dpp_lanes = ~0ull;           // lanes a DPP source left writable (current instruction)

  uint32_t* row(unsigned reg) { return v + size_t(reg) * kLanes; }
  uint64_t s64(unsigned reg) const {
    uint64_t value;
    std::memcpy(&value, &s[reg], 8);
    return value;
  }
  void set_s64(unsigned reg, uint64_t value) { std::memcpy(&s[reg], &value, 8); }
  uint64_t exec() const { return s64(126) & full; }
  void set_exec(uint64_t value) { set_s64(126, value); }
  uint64_t vcc() const { return lanes == 64 ? s64(106) : s[106]; }
  uint32_t m0() const { return s[m0_reg]; }

  // Returns the value of a scalar operand (SGPR, constant, SCC, ...).
  uint32_t scalar32(const Operand& operand) const {
    if (operand.kind == Kind::Sgpr) return s[operand.reg];
    return operand.kind == Kind::Const ? operand.lo : condition(operand);
  }
  uint64_t scalar64(const Operand& operand) const {
    if (operand.kind == Kind::Sgpr) return s64(operand.reg);
    if (operand.kind != Kind::Const) return condition(operand);
    return operand.lo | static_cast<uint64_t>(operand.hi) << 32;
  }
  void put_scalar32(const Operand& operand, uint32_t value) {
    if (operand.kind == Kind::Sgpr) s[operand.reg] = value;
  }
  void put_scalar64(const Operand& operand, uint64_t value) {
    if (operand.kind == Kind::Sgpr) set_s64(operand.reg, value);
  }

  bool all_lanes() const { return exec() == full; }
  // True if Inst::whole may be used instead of Inst::run.
  bool whole() const { return all_lanes() && !gpr_index; }
  Handler handler(const Inst& inst) const { return whole() ? inst.whole : inst.run; }

  // Returns the lanes of source k with all modifiers applied. `tmp` has room for 64 (src32) or 128
  // (src64: low dwords, then high dwords) entries; the result may point into the register file
  // instead.
  const uint32_t* src32(const Inst& inst, int k, uint32_t* tmp) {
    const Operand& operand = inst.src[k];
    return inst.plain_src ? raw32(operand, tmp) : src32_slow(inst, k, tmp);
  }
  // Like src32, without modifiers.
  const uint32_t* raw32(const Operand& operand, uint32_t* tmp) {
    return operand.kind == Kind::Vgpr ? row(operand.reg) : same32(operand, tmp);
  }
  const uint32_t* raw64(const Operand& operand, uint32_t* tmp) {
    return operand.kind == Kind::Vgpr ? row(operand.reg) : same64(operand, tmp);
  }
  const uint32_t* src64(const Inst& inst, int k, uint32_t* tmp) {
    return inst.plain_src ? raw64(inst.src[k], tmp) : src64_slow(inst, k, tmp);
  }
  // Returns a 16-bit source in the low half of each lane, with the upper half zero. op_sel picks
  // the half of the register.
  const uint32_t* src16(const Inst& inst, int k, uint32_t* tmp);
  uint64_t src_mask(const Operand& operand) const;   // Ty::Mask

  // The buffer for a handler's results: the destination register itself if the results need no
  // further processing. Otherwise `out`, which the handler then passes to put32 or put64.
  uint32_t* target(const Inst& inst, uint32_t* out) {
    return inst.plain_dst && all_lanes() ? row(inst.dst[0].reg) : out;
  }
  // Write a handler's results to the active lanes. Clamp, omod, op_sel and the SDWA destination are
  // applied first, according to the type of dst[0].
  void put32(const Inst& inst, uint32_t* out);
  void put64(const Inst& inst, uint32_t* out);
  void put16(const Inst& inst, uint32_t* out);       // low half of each lane of `out`
  // Writes dst[which], a lane mask. Lanes outside EXEC get 0.
  void put_mask(const Inst& inst, int which, uint64_t bits);
  // Copies `from` to `to` for the lanes in `bits`.
  void blend(uint32_t* to, const uint32_t* from, uint64_t bits);

 private:
  uint32_t condition(const Operand& operand) const;   // SCC, VCCZ, EXECZ
  void modify(const Inst& inst, int k, uint32_t* tmp);
  // Writes one value to all lanes of `tmp`. It is not inlined, because hundreds of handlers call
  // it.
  const uint32_t* same32(const Operand& operand, uint32_t* tmp);
  const uint32_t* same64(const Operand& operand, uint32_t* tmp);
  const uint32_t* dpp_row(const Inst& inst, const uint32_t* from, uint32_t* tmp);
  const uint32_t* src32_slow(const Inst& inst, int k, uint32_t* tmp);
  const uint32_t* src64_slow(const Inst& inst, int k, uint32_t* tmp);
  void put32_slow(const Inst& inst, uint32_t* out);
};

}  // namespace ark_emu
