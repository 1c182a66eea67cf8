// Holds memory operations between their issue and their effect, and performs them through the
// first-level cache.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "decode.h"
#include "fp_mode.h"
#include "grid.h"
#include "mem_ops.h"
#include "memory.h"
#include "ops.h"
#include "stale.h"
#include "waits.h"

namespace ark_emu {

namespace {

constexpr uint32_t kFirstLines = 1024;
// Probabilities, as one of this many at random. kForgets: a hit counts as a miss. kDeferred: an
// operation takes effect later than it is issued. kPulls: a store finds an old copy of its line in
// another unit's first-level cache. kProgress: a slice lets a deferred operation take effect.
constexpr uint64_t kForgets = 64;
constexpr uint64_t kDeferred = 2;
constexpr uint64_t kPulls = 3;
constexpr uint64_t kProgress = 12;

bool is_cdna3(const Wave& w) {
  const Arch arch = w.grid->program->arch();
  return arch == Arch::gfx942 || arch == Arch::gfx950;
}

bool is_atomic(const Inst& i) {
  return (i.op->flags & (kSync | kStore)) == (kSync | kStore);
}

Reach reach_of(const Wave& w, const Inst& i) {
  if (is_atomic(i)) return is_cdna3(w) && i.scc_bit ? Reach::System : Reach::Agent;
  if (!is_cdna3(w)) return i.glc ? Reach::Agent : Reach::Group;
  if (i.scc_bit) return i.glc ? Reach::System : Reach::Agent;
  return Reach::Group;
}

int bytes_of(const Inst& i) {
  const int dwords = std::max<int>(i.op->dst_count > 0 ? i.dst[0].dwords : 0,
                                   i.op->src_count > 1 ? i.src[1].dwords : 0);
  return 4 * std::clamp(dwords, 1, 4);
}

// A range of register rows, given by the first one and their number. The functions below return the
// rows that an instruction reads.
struct Rows {
  unsigned first = 0, count = 0;
};
Rows address_rows(const Inst& i) {
  if (i.src[0].kind != Kind::Vgpr) return {};
  return {i.src[0].reg, i.src[0].dwords};
}
Rows data_rows(const Inst& i) {
  if (i.op->src_count < 2 || i.src[1].kind != Kind::Vgpr) return {};
  return {i.src[1].reg, std::min<unsigned>(i.src[1].dwords, 4)};
}
// Returns the register rows that an instruction writes.
Rows result_rows(const Inst& i) {
  if (is_atomic(i)) {
    if (!i.glc) return {};
    if (i.format == Format::MUBUF) return {i.src[1].reg, i.src[1].dwords};
  }
  if (i.op->dst_count == 0 || i.dst[0].kind != Kind::Vgpr) return {};
  return {i.dst[0].reg, i.dst[0].dwords};
}

}  // namespace

StaleGrid::StaleGrid(Grid& grid, DeviceCaches& caches)
    : grid_(grid), caches_(caches), random_{grid.desc.options.seed * 0x2545f4914f6cdd1dull + 77} {
  const std::lock_guard lock(caches_.mutex);
  caches_.settle();   // the start of a dispatch does this
}

StaleGrid::~StaleGrid() {
  const std::lock_guard lock(caches_.mutex);
  caches_.settle();
}

void StaleGrid::add_wave(Wave& w, bool wgp) {
  const bool rdna = grid_.program->arch() == Arch::gfx1100;
  const uint32_t halves = rdna && wgp ? 2 : 1, index = w.group->index;
  const size_t number = index * halves + w.id_in_group % halves;
  while (units_.size() <= number) {
    units_.push_back(std::make_unique<ComputeUnit>());
    units_.back()->cache.make(kFirstLines, grid_.desc.options.seed + units_.size());
    units_.back()->part = grid_.desc.grid.count() > 1 ? index % 8 : 0;
  }
  auto s = std::make_unique<StaleWave>();
  s->unit = units_[number].get();
  s->part = s->unit->part;
  w.stale = s.get();
  waves_.push_back(std::move(s));
}

Placement StaleGrid::placement(Wave& w, uint64_t address) const {
  Placement place;
  const RegionEntry* entry = w.grid->view.find(address, 1);
  if (entry == nullptr) return place;
  const Region& region = entry->region;
  place.peer = region.device >= 0 && (region.device != grid_.device || region.shared);
  place.inner = region.kind == MemKind::Device || region.kind == MemKind::Fine;
  place.through = region.kind == MemKind::Fine;
  place.outer = region.kind == MemKind::Device;
  place.local = place.outer && region.device == grid_.device;
  return place;
}

// ---------------------------------------------------------------- taking effect

const uint8_t* StaleGrid::content(Wave& w, uint64_t line, uint64_t address, Reach reach,
                                  bool scalar) {
  StaleWave& s = *w.stale;
  const Placement place = placement(w, address);
  if (scalar || reach >= Reach::Agent) {
    if (CacheLine* at = scalar ? nullptr : s.unit->cache.find(line); at != nullptr) at->valid = 0;
    caches_.read(s.part, line, place, reach, random_, fetched_);
    return fetched_;
  }
  CacheLine& at = s.unit->cache.claim(line, false, [](CacheLine&) {});
  if (at.valid == ~ByteMask{0} && random_.below(kForgets) != 0) return at.data;
  caches_.read(s.part, line, place, reach, random_, at.data);
  at.valid = ~ByteMask{0};
  return at.data;
}

void StaleGrid::load(Wave& w, const Inst& i, const Addresses& a, int bytes, uint32_t* rows) {
  const std::lock_guard lock(caches_.mutex);
  const Reach reach = reach_of(w, i);
  const bool scalar = i.format == Format::SMEM;
  uint64_t held = ~0ull;
  const uint8_t* from = nullptr;
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    uint8_t element[16] = {};
    for (uint64_t k = 0; k < static_cast<uint64_t>(bytes);) {
      const uint64_t address = a.at[l] + k, line = address / kStaleLine;
      const uint64_t offset = address % kStaleLine;
      const uint64_t step = std::min(static_cast<uint64_t>(bytes) - k, kStaleLine - offset);
      if (line != held) from = content(w, line, address, reach, scalar);
      held = line;
      std::memcpy(element + k, from + offset, step);
      k += step;
    }
    for (int d = 0; d * 4 < bytes; d++) std::memcpy(&rows[d * kLanes + l], element + 4 * d, 4);
  }
}

// Makes a random compute unit read a line just before the line changes, so that the unit's cache
// holds the old contents. A wave of that unit might have done this read.
void StaleGrid::pull(uint64_t line, Placement place) {
  ComputeUnit& unit = *units_[random_.below(units_.size())];
  CacheLine& at = unit.cache.claim(line, false, [](CacheLine&) {});
  if (at.valid == ~ByteMask{0}) return;
  caches_.read(unit.part, line, place, Reach::Group, random_, at.data);
  at.valid = ~ByteMask{0};
}

bool StaleGrid::store(Wave& w, const Inst& i, const Addresses& a, int bytes,
                      const uint32_t* rows) {
  const std::lock_guard lock(caches_.mutex);
  StaleWave& s = *w.stale;
  const Reach reach = reach_of(w, i);
  bool changed = false;
  uint64_t pulled = ~0ull;
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    uint8_t element[16];
    for (int d = 0; d * 4 < bytes; d++) std::memcpy(element + 4 * d, &rows[d * kLanes + l], 4);
    for (uint64_t k = 0; k < static_cast<uint64_t>(bytes);) {
      const uint64_t address = a.at[l] + k, offset = address % kStaleLine;
      const uint64_t step = std::min(static_cast<uint64_t>(bytes) - k, kStaleLine - offset);
      const uint64_t line = address / kStaleLine;
      const Placement place = placement(w, address);
      if (line != pulled && random_.below(kPulls) == 0) pull(line, place);
      pulled = line;
      if (CacheLine* at = s.unit->cache.find(line); at != nullptr) {
        std::memcpy(at->data + offset, element + k, step);
      }
      changed |= caches_.write(s.part, address, element + k, static_cast<int>(step), place, reach);
      k += step;
    }
  }
  return changed;
}

uint8_t* StaleGrid::cell(Wave& w, const Inst& i, uint64_t address, int bytes) {
  StaleWave& s = *w.stale;
  if (CacheLine* at = s.unit->cache.find(address / kStaleLine); at != nullptr) at->valid = 0;
  return caches_.cell(s.part, address, bytes, placement(w, address), reach_of(w, i));
}

// ---------------------------------------------------------------- in flight

// Collects the lines that the active lanes access, each once. Returns false if some of the memory
// is not cached.
bool StaleGrid::lines_of(Wave& w, const Inst& i, std::vector<uint64_t>& lines) {
  const int bytes = bytes_of(i);
  const Addresses a =
      i.format == Format::MUBUF ? buffer_addresses(w, i, bytes) : flat_addresses(w, i);
  bool cached = true;
  lines.clear();
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const uint64_t address = a.at[std::countr_zero(rest)];
    const uint64_t last = (address + static_cast<uint64_t>(bytes) - 1) / kStaleLine;
    for (uint64_t line = address / kStaleLine; line <= last; line++) {
      if (!lines.empty() && lines.back() == line) continue;
      if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
    }
    const RegionEntry* entry = w.grid->view.find(address, 1);
    cached &= entry != nullptr && entry->region.kind != MemKind::Code &&
              entry->region.kind != MemKind::Queue;
  }
  return cached;
}

// Performs those of the unit's operations on these lines that were issued before `until`.
void StaleGrid::make_way(ComputeUnit& unit, const std::vector<uint64_t>& lines,
                         const Flight* until) {
  if (unit.waiting.empty()) return;
  for (const uint64_t line : lines) {
    for (;;) {
      const auto found = unit.waiting.find(line);
      if (found == unit.waiting.end() || found->second.front() == until) break;
      perform(*found->second.front());
    }
  }
}

void StaleGrid::defer(Wave& w, const Inst& i, std::vector<uint64_t> lines) {
  if (spare_.empty()) {
    flights_.push_back(std::make_unique<Flight>());
    spare_.push_back(flights_.back().get());
  }
  Flight& f = *spare_.back();
  spare_.pop_back();
  f.inst = &i;
  f.wave = &w;
  f.unit = w.stale->unit;
  f.performed = false;
  f.lines = std::move(lines);
  std::memcpy(f.s, w.s, sizeof f.s);
  const Rows address = address_rows(i), data = data_rows(i);
  std::memcpy(f.address, w.row(address.first), address.count * kLanes * 4);
  std::memcpy(f.data, w.row(data.first), data.count * kLanes * 4);
  for (const uint64_t line : f.lines) f.unit->waiting[line].push_back(&f);
  f.place = pending_.size();
  pending_.push_back(&f);
}

// Runs the handler of an operation when the operation takes effect. Meanwhile the registers have
// the values of the time of issue. Registers that the handler does not write are restored
// afterwards.
void StaleGrid::run(Flight& f) {
  Wave& w = *f.wave;
  const Inst& i = *f.inst;
  if (i.op->src_count == 0) return control(w, i);
  alignas(64) uint32_t now_address[2 * kLanes], now_data[4 * kLanes];
  uint32_t now_s[sizeof(Wave::s) / 4];
  const Rows address = address_rows(i), data = data_rows(i), result = result_rows(i);
  const auto swap_in = [&w](Rows rows, uint32_t* keep, const uint32_t* from) {
    std::memcpy(keep, w.row(rows.first), rows.count * kLanes * 4);
    std::memcpy(w.row(rows.first), from, rows.count * kLanes * 4);
  };
  swap_in(address, now_address, f.address);
  swap_in(data, now_data, f.data);
  std::memcpy(now_s, w.s, sizeof now_s);
  std::memcpy(w.s, f.s, sizeof now_s);
  const uint64_t lanes = w.exec();
  const bool changed = std::exchange(w.changed, false);
  {
    const FpMode scope((i.op->flags & kOwnRounding) != 0 ? 0xf0 : w.mode,
                       (i.op->flags & kMode64) != 0);
    i.run(w, i);
  }
  if (w.changed) grid_.note_change();
  w.changed |= changed;
  std::memcpy(w.s, now_s, sizeof now_s);
  const auto swap_out = [&](Rows rows, const uint32_t* kept) {
    for (unsigned k = 0; k < rows.count; k++) {
      const unsigned row = rows.first + k;
      const bool written = row >= result.first && row < result.first + result.count;
      w.blend(w.row(row), kept + k * kLanes, written ? ~lanes & w.full : w.full);
    }
  };
  swap_out(data, now_data);
  swap_out(address, now_address);
}

void StaleGrid::perform(Flight& f) {
  if (f.performed) return;
  if (f.inst->op->src_count == 0) {   // a write-back waits for its wave's earlier operations
    StaleWave& s = *f.wave->stale;
    for (size_t k = 0; k < s.loads.size() && s.loads[k] != &f; k++) {
      if (s.loads[k] != nullptr) perform(*s.loads[k]);
    }
  }
  make_way(*f.unit, f.lines, &f);
  f.performed = true;
  for (const uint64_t line : f.lines) {
    const auto found = f.unit->waiting.find(line);
    found->second.pop_front();
    if (found->second.empty()) f.unit->waiting.erase(found);
  }
  pending_[f.place] = pending_.back();
  pending_[f.place]->place = f.place;
  pending_.pop_back();
  run(f);
}

void StaleGrid::keep(std::deque<Flight*>& flights, size_t left) {
  while (flights.size() > left) {
    Flight* f = flights.front();
    if (f != nullptr) {
      perform(*f);
      spare_.push_back(f);
    }
    flights.pop_front();
  }
}

void StaleGrid::drain(StaleWave& s) {
  keep(s.loads, 0);
  keep(s.stores, 0);
}

void StaleGrid::progress() {
  if (pending_.empty() || random_.below(kProgress) != 0) return;
  perform(*pending_[random_.below(pending_.size())]);
}

void StaleGrid::settle() {
  while (!pending_.empty()) perform(*pending_.back());
  const std::lock_guard lock(caches_.mutex);
  for (const auto& unit : units_) unit->cache.drop_clean();
  caches_.drop_clean();
}

// ---------------------------------------------------------------- issue

void StaleGrid::control(Wave& w, const Inst& i) {
  const std::lock_guard lock(caches_.mutex);
  const unsigned part = w.stale->part;
  if (i.op->name == "buffer_wbl2") {
    caches_.write_back(part, is_cdna3(w) ? reach_of(w, i) : Reach::System);
  } else if (i.op->name == "buffer_inv") {
    const Reach reach = reach_of(w, i);
    if (reach >= Reach::Agent) w.stale->unit->cache.drop_clean();
    caches_.invalidate(part, reach);
  } else if (i.op->name == "buffer_invl2") {
    caches_.invalidate(part, Reach::System);
  } else if (i.op->name == "buffer_gl1_inv") {
    caches_.invalidate(part, Reach::Agent);
  } else {
    w.stale->unit->cache.drop_clean();   // buffer_wbinvl1, buffer_wbinvl1_vol, buffer_gl0_inv
  }
}

void StaleGrid::wait(Wave& w, const Inst& i) {
  const WaitCounts counts = wait_counts(i, grid_.program->arch());
  keep(w.stale->loads, counts.vm);
  keep(w.stale->stores, counts.vs);
}

bool StaleGrid::issue(Wave& w, const Inst& i) {
  if (i.op == nullptr) return false;
  StaleWave& s = *w.stale;
  switch (i.format) {
    case Format::SOPP: case Format::SOPK:
      if (is_wait(i)) wait(w, i);
      if (i.op->name == "s_endpgm") drain(s);
      return false;
    case Format::GLOBAL: case Format::FLAT: case Format::MUBUF: break;
    default: return false;
  }
  const bool rdna = grid_.program->arch() == Arch::gfx1100;
  const bool back = i.op->name == "buffer_wbl2";
  if (i.format == Format::MUBUF && i.op->src_count == 0) {
    if (back) {
      defer(w, i, {});
      s.loads.push_back(pending_.back());
    } else {
      control(w, i);
    }
    return true;
  }
  const bool no_result = (i.op->flags & kStore) != 0 && !(is_atomic(i) && i.glc);
  std::deque<Flight*>& counter = rdna && no_result ? s.stores : s.loads;
  const bool cached = lines_of(w, i, touched_);
  const Rows result = result_rows(i);
  for (size_t k = 0; k < s.loads.size() && result.count > 0; k++) {   // loads return in order
    Flight* f = s.loads[k];
    if (f == nullptr || f->performed || f->inst->op->src_count == 0) continue;
    const Rows other = result_rows(*f->inst);
    const bool apart = other.first + other.count <= result.first ||
                       result.first + result.count <= other.first;
    if (!apart) perform(*f);
  }
  const bool later = cached && i.format != Format::FLAT && w.watched == nullptr &&
                     random_.below(kDeferred) == 0;
  if (!later) {
    const std::vector<uint64_t> lines = touched_;
    make_way(*s.unit, lines, nullptr);
    counter.push_back(nullptr);
    if (counter.size() > 64) keep(counter, 63);   // the most that the counter can count
    return false;
  }
  defer(w, i, touched_);
  counter.push_back(pending_.back());
  if (counter.size() > 64) keep(counter, 63);
  return true;
}

}  // namespace ark_emu
