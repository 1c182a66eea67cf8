#include "timing.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <string>

#include "access.h"
#include "disasm.h"
#include "grid.h"
#include "wave.h"

namespace ark_emu {

Addresses flat_addresses(Wave& w, const Inst& i);   // exec_mem.cpp

namespace {

constexpr double kSlack = 64;   // cycles that a wave may run ahead of the others
constexpr uint64_t kLine = 128;

// Operands of s_waitcnt, encoded as in the instruction. Each limits the accesses that a wave has in
// flight to what the wave's counter can count.
//
// The counter vmcnt, of accesses to global memory, counts to 63. So a wave waits after each access
// until at most 62 are in flight: vmcnt(62).
constexpr uint32_t kMostUnderWay = (62 & 15) | (62 >> 4) << 14 | 15 << 8;
// The counter lgkmcnt, of LDS accesses and scalar loads, counts to 15. So a wave waits after each
// of them until at most 14 are in flight: lgkmcnt(14).
constexpr uint32_t kMostScalar = 15 | 3 << 14 | 14 << 8;
constexpr double kMoment = 500;   // nanoseconds per entry of memory_bytes_

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

uint8_t access_bytes(std::string_view name) {
  if (has(name, "dwordx4") || has(name, "b128")) return 16;
  if (has(name, "dwordx3") || has(name, "b96")) return 12;
  if (has(name, "dwordx2") || has(name, "b64") || has(name, "_x2") || has(name, "f64")) return 8;
  return 4;
}

// The number of multiplications and additions of a matrix instruction, from its name (such as
// v_mfma_f32_32x32x8_2b_...). It is scaled by the rate of the instruction's operand type relative
// to 16-bit types.
double matrix_work(std::string_view name) {
  double shape[4] = {1, 1, 1, 1};
  const size_t x = name.find('x');
  size_t at = x;
  while (at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9') at--;
  const std::string text(name.substr(at));
  const char* p = text.c_str();
  for (double& n : shape) {
    char* end = nullptr;
    const auto value = static_cast<double>(std::strtoul(p, &end, 10));
    if (end == p) break;
    n = value;
    if (*end != 'x' && *end != '_') break;
    p = end + 1;
  }
  const std::string_view types(name.substr(x));
  double slow = 1;
  if (has(types, "f64")) slow = 8;
  else if (has(types, "xf32")) slow = 2;
  else if (has(types, "f32")) slow = 8;
  else if (has(types, "i8") || has(types, "f8")) slow = 0.5;
  const bool blocks = has(types, "_2b") || has(types, "_4b") || has(types, "_16b");
  return 2 * shape[0] * shape[1] * shape[2] * (blocks ? shape[3] : 1) * slow;
}

bool quarter_rate(std::string_view name) {
  for (const char* word : {"v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_"}) {
    if (name.starts_with(word)) return true;
  }
  return has(name, "mul_lo_u32") || has(name, "mul_hi_u32") || has(name, "mul_hi_i32");
}

}  // namespace

Timing::Timing(const TimingModel& model, Grid& grid)
    : model_(model),
      grid_(grid),
      places_(grid.view, grid.desc.options.seed),
      mall_(model.mall_lines) {
  const auto count = static_cast<size_t>(model.units);
  units_.reserve(count);
  for (size_t k = 0; k < count; k++) units_.emplace_back(model.l1_lines);
  simds_.resize(count * 4);
  for (int k = 0; k < model.dies; k++) dies_.emplace_back(model.l2_lines);
}

Timing::~Timing() {
  const char* path = std::getenv("ARK_ROCM_EMULATOR_PROFILE");
  if (path == nullptr) return;
  std::ofstream file(path);
  for (uint32_t pc = 0; pc < spent_.size(); pc++) {
    const Spent& s = spent_[pc];
    if (s.cycles == 0 && s.lds.cycles == 0) continue;
    file << std::hex << pc * 4 << std::dec << '\t' << static_cast<uint64_t>(s.cycles) << '\t'
         << static_cast<uint64_t>(s.lds.cycles) << '\t' << static_cast<uint64_t>(s.lds.conflicts)
         << '\t' << disassemble(grid_.program->at(pc), model_.arch) << '\n';
  }
  std::ofstream read(std::string(path) + ".memory");
  for (size_t k = 0; k < memory_bytes_.size(); k++) {
    if (memory_bytes_[k] != 0) {
      read << static_cast<double>(k) * kMoment / 1000 << '\t' << memory_bytes_[k] << '\n';
    }
  }
}

// Adds the time since t.mark to the cycles of the instruction at which the wave was in this time.
void Timing::spend(WaveTiming& t) {
  spent(t.at).cycles += t.now - t.mark;
  t.mark = t.now;
}

Timing::Spent& Timing::spent(uint32_t pc) {
  if (pc >= spent_.size()) spent_.resize(pc + 1024);
  return spent_[pc];
}

void Timing::add(Wave& w) {
  WaveTiming& t = *waves_.emplace_back(std::make_unique<WaveTiming>());
  w.timing = &t;
  t.unit = w.group->index % static_cast<uint32_t>(model_.units);
  t.simd = t.unit * 4 + w.id_in_group % 4;
  queue(w);
}

Wave* Timing::next() {
  if (turns_.empty()) return nullptr;
  Wave* wave = turns_.top().wave;
  turns_.pop();
  wave->timing->queued = false;
  return wave;
}

void Timing::queue(Wave& w) {
  if (w.timing->queued) return;
  w.timing->queued = true;
  turns_.push({w.timing->now, order_++, &w});
}

bool Timing::ahead(const Wave& w) const {
  return !turns_.empty() && w.timing->now > turns_.top().time + kSlack;
}

uint64_t Timing::ticks(const Wave& w) const {
  return static_cast<uint64_t>(w.timing->now / model_.ghz / 10) + 1;
}

Cost Timing::cost_of(const Inst& i) const {
  Cost cost;
  cost.known = true;
  const std::string_view name = i.op != nullptr ? std::string_view(i.op->name) : "";
  switch (i.format) {
    case Format::SOP1: case Format::SOP2: case Format::SOPC: case Format::SOPK:
      cost.unit = Unit::Scalar;
      break;
    case Format::SOPP:
      if (name == "s_waitcnt") cost.unit = Unit::Wait;
      else if (name == "s_sleep") cost.unit = Unit::Sleep;
      else if (has(name, "branch")) cost.unit = Unit::Branch;
      else if (name == "s_nop") cost.issue = static_cast<float>((i.imm & 15) + 1);
      break;
    case Format::SMEM:
      cost.unit = name == "s_dcache_inv" ? Unit::Other : Unit::ScalarLoad;
      break;
    case Format::VOP1: case Format::VOP2: case Format::VOPC: case Format::VOP3:
    case Format::VOP3P: case Format::VOPD:
      cost.unit = Unit::Vector;
      if (has(name, "mfma") || has(name, "smfmac")) {
        cost.unit = Unit::Matrix;
        // A matrix instruction takes at least two passes of four cycles: instructions with blocks
        // of 4x4 run at half the rate.
        cost.latency = static_cast<float>(std::max(8.0, matrix_work(name) / model_.matrix_flops));
      } else if (quarter_rate(name)) {
        cost.issue = 16;
      }
      break;
    case Format::DS:
      cost.unit = Unit::Lds;
      cost.bytes = access_bytes(name);
      cost.accesses = has(name, "read2") || has(name, "write2") ? 2 : 1;
      // These instructions exchange values between lanes without accessing the LDS's banks: their
      // operand is not an address.
      if (has(name, "swizzle") || has(name, "permute")) cost.accesses = 0;
      break;
    case Format::FLAT: case Format::GLOBAL: case Format::SCRATCH: case Format::MUBUF:
      if (has(name, "wbl2")) cost.unit = Unit::Flush;
      else if (has(name, "inv")) cost.unit = Unit::Invalidate;
      else if (has(name, "atomic")) cost.unit = Unit::Atomic;
      else if (has(name, "store")) cost.unit = Unit::Store;
      else cost.unit = Unit::Load;
      cost.bytes = access_bytes(name);
      break;
    default: break;
  }
  return cost;
}

Cost& Timing::known(const Inst& i) {
  if (i.pc >= costs_.size()) costs_.resize(i.pc + 1024);
  Cost& cost = costs_[i.pc];
  if (!cost.known) cost = cost_of(i);
  return cost;
}

// A bit that marks a line which memory has not delivered to the memory-side cache yet.
constexpr uint64_t kArriving = uint64_t{1} << 63;

// Returns the time at which a line has arrived in a cache. Until then the line is in flight from
// memory.
double Timing::arrived(uint64_t line, uint64_t way, double at) {
  const auto found = shared_.find(way);
  if (found == shared_.end()) return at;
  const double visible = found->second.visible;
  if (at > visible) {
    shared_.erase(found);
    shared_.erase(line | kArriving);
  }
  return std::max(at, visible);
}

// Returns the time at which a line of 128 bytes, requested at time `at`, has arrived through the
// caches.
double Timing::fetch(WaveTiming& t, uint64_t line, double at, Through through) {
  ComputeUnit& unit = units_[t.unit];
  // The key under which a line that is in flight to a die is found, so that later requests for the
  // line wait for it. Streaming loads (with the bit nt) do not share a line in this way.
  const uint64_t way = line | uint64_t{8 + t.unit % static_cast<uint32_t>(model_.dies)} << 59;
  const bool kept = through != Through::None;
  if (kept) {
    const bool scalar = through == Through::Scalar;
    LineCache& first = scalar ? unit.scalar : unit.l1;
    const double latency = scalar ? model_.scalar_latency : model_.l1_latency;
    if (first.find(line)) return arrived(line, way, at + latency);
    first.fill(line);
  }
  Die& die = dies_[t.unit % static_cast<uint32_t>(model_.dies)];
  constexpr double kBytes = kLine;
  at = die.l2_port.serve(at, kBytes / model_.l2_width);
  if (die.l2.find(line)) return arrived(line, way, at + model_.l2_latency);
  die.l2.fill(line);
  at = die.fabric.serve(at, kBytes / model_.fabric_width);
  at = mall_port_.serve(at, kBytes / model_.mall_width);
  double there = at + model_.mall_latency;
  if (mall_.find(line)) {
    const auto found = shared_.find(line | kArriving);
    if (found != shared_.end()) there = std::max(there, found->second.visible);
  } else {
    mall_.fill(line);
    const double served = memory_.serve(at, kBytes / model_.memory_width);
    const auto moment = static_cast<size_t>(served / model_.ghz / kMoment);
    if (moment >= memory_bytes_.size()) memory_bytes_.resize(moment + 1024);
    memory_bytes_[moment] += kLine;
    there = served + model_.memory_latency;
    if (kept) shared_[line | kArriving].visible = there;
  }
  if (kept) shared_[way].visible = there;
  return there;
}

// Returns the time of an access that is performed at the memory side, where accesses to one line
// are serialised. A load that returned a stored value must be later than the store. If its computed
// time is earlier, the load counts as a poll that was repeated until then.
double Timing::coherent(WaveTiming& t, uint64_t line, double at, bool writes, bool changes) {
  const uint32_t number = t.unit % static_cast<uint32_t>(model_.dies);
  Die& die = dies_[number];
  const double way = model_.coherent_latency / 2;
  at = die.fabric.serve(die.l2_port.serve(at, kLine / model_.l2_width),
                        32 / model_.fabric_width);
  Shared& shared = shared_[line];
  const double arrives = at + way;
  double served = shared.server.serve(arrives, writes ? model_.atomic_step : model_.poll_step);
  if (changes) {
    shared.visible = served;
    shared.die = number;
  }
  if (!writes) {
    served = std::max(served, shared.visible);
    if (shared.die != number) served += model_.cross_die;
  }
  return served + way;
}

void Timing::access(Wave& w, const Inst& i, const Cost& cost) {
  WaveTiming& t = *w.timing;
  ComputeUnit& unit = units_[t.unit];
  const bool load = cost.unit == Unit::Load;
  double done = t.now + model_.l2_latency;
  if (i.format == Format::GLOBAL || i.format == Format::FLAT) {
    const Addresses a = flat_addresses(w, i);
    uint64_t lines[2 * kLanes];
    int count = 0;
    for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
      const uint64_t at = places_.of(a.at[std::countr_zero(rest)]);
      for (uint64_t line = at / kLine; line <= (at + cost.bytes - 1) / kLine; line++) {
        if (count > 0 && lines[count - 1] == line) continue;
        if (std::find(lines, lines + count, line) == lines + count) lines[count++] = line;
      }
    }
    const double busy = std::max(4.0, count * double{kLine} / model_.l1_width);
    // Only one access of a wave may wait for the address unit: the next access issues when the unit
    // has accepted this one. Without this limit, a wave could enter accesses of the far future into
    // the caches' queues, before earlier requests of other waves.
    t.now = std::max(t.now, t.taken);
    const double address = unit.addresses.serve(t.now, busy);
    t.taken = address - busy;
    done = address;
    Die& die = dies_[t.unit % static_cast<uint32_t>(model_.dies)];
    // An access with the bit sc1 goes beyond this die's L2. Atomics are performed at the memory
    // side, because the dies do not share an L2.
    const bool outside = i.scc_bit || cost.unit == Unit::Atomic;
    for (int k = 0; k < count; k++) {
      double there;
      if (outside) {
        there = coherent(t, lines[k], address, !load, !load);
      } else if (load) {
        there = fetch(t, lines[k], address, i.glc || i.slc ? Through::None : Through::Vector);
      } else {
        there = die.l2_port.serve(address, kLine / model_.l2_width) + model_.l2_latency;
        if (!die.l2.find(lines[k])) die.l2.fill(lines[k]);
        die.dirty++;
      }
      done = std::max(done, there);
    }
  }
  if (!t.vector_queue.empty()) done = std::max(done, t.vector_queue.back());
  t.vector_queue.push_back(done);
  wait(t, kMostUnderWay);
}

// The cycles for which the LDS is busy: lanes that access different dwords of one bank are
// serialised.
Timing::LdsUse Timing::lds_use(Wave& w, const Inst& i, const Cost& cost) const {
  const auto banks = static_cast<uint32_t>(model_.lds_width / 4);
  const uint32_t dwords = std::max(1, cost.bytes / 4);
  const uint32_t at_once = std::max(1u, banks / dwords);   // lanes
  if (cost.accesses == 0) return {static_cast<double>(w.lanes) / banks, 0};
  if (i.src[0].kind != Kind::Vgpr) return {4, 0};
  const uint32_t* address = w.row(i.src[0].reg);
  const uint64_t active = w.exec();
  LdsUse use;
  for (uint32_t first = 0; first < static_cast<uint32_t>(w.lanes); first += at_once) {
    uint8_t load[64] = {};
    uint32_t held[64] = {};
    uint8_t most = 0;
    for (uint32_t l = first; l < first + at_once && l < static_cast<uint32_t>(w.lanes); l++) {
      if (((active >> l) & 1) == 0) continue;
      const uint32_t word = address[l] / 4, bank = word % banks;
      if (load[bank] != 0 && held[bank] == word) continue;   // lanes share a dword
      held[bank] = word;
      most = std::max(most, ++load[bank]);
    }
    use.cycles += most;
    if (most > 1) use.conflicts += most - 1;
  }
  return {std::max(use.cycles * cost.accesses, 1.0), use.conflicts * cost.accesses};
}

void Timing::wait(WaveTiming& t, uint32_t imm) const {
  const size_t vector = (imm & 15) | ((imm >> 14) & 3) << 4, scalar = (imm >> 8) & 15;
  const auto drain = [&t](std::vector<double>& queue, size_t left) {
    if (queue.size() <= left) return;
    const auto over = static_cast<ptrdiff_t>(queue.size() - left);
    t.now = std::max(t.now, queue[static_cast<size_t>(over) - 1]);
    queue.erase(queue.begin(), queue.begin() + over);
  };
  if (vector < 63) drain(t.vector_queue, vector);
  if (scalar < 15) drain(t.scalar_queue, scalar);
}

// The time at which matrix instructions have written the registers that a vector instruction reads.
double Timing::operands_ready(const Wave& w, const Inst& i) const {
  const WaveTiming& t = *w.timing;
  double ready = t.now;
  if (t.matrix_until <= t.now) return ready;
  const auto look = [&](const Operand& operand) {
    if (operand.kind != Kind::Vgpr) return;
    for (unsigned r = 0; r < std::max<unsigned>(1, operand.dwords); r++) {
      if (operand.reg + r < 512u) ready = std::max(ready, t.ready[operand.reg + r]);
    }
  };
  for (const Operand& operand : i.src) look(operand);
  for (const Operand& operand : i.dst) look(operand);
  return ready;
}

void Timing::before(Wave& w, const Inst& i) {
  WaveTiming& t = *w.timing;
  spend(t);   // the time of the barrier
  t.at = i.pc;
  const Cost cost = known(i);
  Simd& simd = simds_[t.simd];
  switch (cost.unit) {
    case Unit::Wait: wait(t, static_cast<uint32_t>(i.imm)); break;
    case Unit::Sleep: t.now += 64.0 * (i.imm & 127); break;
    case Unit::Scalar: case Unit::Branch: case Unit::Other:
      t.now = simd.scalar.serve(t.now, cost.issue);
      return;
    case Unit::Vector: {
      t.now = operands_ready(w, i);
      t.now = simd.vector.serve(t.now, cost.issue);
      return;
    }
    case Unit::Matrix: {
      t.now = operands_ready(w, i);
      const double end = simd.matrix.serve(t.now, cost.latency);
      t.now = std::max(t.now, end - cost.latency) + cost.issue;
      const Operand& to = i.dst[0];
      for (unsigned r = 0; r < to.dwords && to.reg + r < 512u; r++) t.ready[to.reg + r] = end;
      t.matrix_until = std::max(t.matrix_until, end);
      return;
    }
    case Unit::Lds: {
      t.now = operands_ready(w, i);
      const LdsUse use = lds_use(w, i, cost);
      const double end = units_[t.unit].lds.serve(t.now, use.cycles);
      LdsUse& all = spent(i.pc).lds;
      all.cycles += use.cycles;
      all.conflicts += use.conflicts;
      t.now += cost.issue;
      t.scalar_queue.push_back(std::max(end + model_.lds_latency,
                                        t.scalar_queue.empty() ? 0 : t.scalar_queue.back()));
      wait(t, kMostScalar);
      return;
    }
    case Unit::ScalarLoad: {
      double done = t.now + model_.scalar_latency;
      if (i.src[0].kind == Kind::Sgpr) {
        const uint64_t offset = static_cast<uint64_t>(static_cast<int64_t>(i.imm)) +
                                (i.src[1].kind == Kind::Sgpr ? w.scalar32(i.src[1]) : 0);
        const uint64_t line = places_.of(w.s64(i.src[0].reg) + offset) / kLine;
        done = fetch(t, line, t.now, Through::Scalar);
      }
      t.now += cost.issue;
      t.scalar_queue.push_back(
          std::max(done, t.scalar_queue.empty() ? 0 : t.scalar_queue.back()));
      wait(t, kMostScalar);
      return;
    }
    case Unit::Load: case Unit::Store: case Unit::Atomic:
      t.now = operands_ready(w, i);
      access(w, i, cost);
      break;
    case Unit::Flush: {
      Die& die = dies_[t.unit % static_cast<uint32_t>(model_.dies)];
      const double bytes = static_cast<double>(die.dirty) * double{kLine};
      const double end = die.fabric.serve(t.now, bytes / model_.fabric_width) + model_.flush;
      die.dirty = 0;
      t.vector_queue.push_back(
          std::max(end, t.vector_queue.empty() ? 0 : t.vector_queue.back()));
      break;
    }
    case Unit::Invalidate: {
      units_[t.unit].l1.clear();
      if (i.scc_bit) dies_[t.unit % static_cast<uint32_t>(model_.dies)].l2.clear();
      t.vector_queue.push_back(std::max(t.now + model_.invalidate,
                                        t.vector_queue.empty() ? 0 : t.vector_queue.back()));
      break;
    }
  }
  t.now += cost.issue;
}

void Timing::after(Wave& w, const Inst& i) {
  WaveTiming& t = *w.timing;
  if (w.pc != i.next && costs_[i.pc].unit == Unit::Branch) t.now += model_.taken_branch;
  latest_ = std::max(latest_, t.now);
  spend(t);
}

void Timing::released(Workgroup& group) {
  double last = 0;
  for (const Wave* wave : group.waves) {
    if (wave->status == WaveStatus::Barrier) last = std::max(last, wave->timing->now);
  }
  for (Wave* wave : group.waves) {
    if (wave->status != WaveStatus::Barrier) continue;
    wave->timing->now = last + model_.barrier;
    queue(*wave);
  }
}

}  // namespace ark_emu
