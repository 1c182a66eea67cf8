#include "checks_shared.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>

#include "grid.h"

namespace ark_emu {
namespace {

// Sizes of a ledger: the waves that exist at a time, the waves that an entry knows, and the entries
// that are kept.
constexpr uint32_t kSlots = 16384, kKnown = 4096, kLog = 8192;

// The ledger of a process: a file with the states of its waves, which other processes read. The
// file is sparse: most of its pages are never used.
struct Ledger {
  struct Slot {
    uint32_t start = 0, live = 0;
    uint64_t ended = 0;                  // when the slot's last wave ended
  };
  // A wave of any process, and the epochs up to which its accesses (epoch) and its loads (past) are
  // ordered before a release.
  struct Known {
    uint32_t process;
    int32_t ledger;
    uint32_t slot, epoch, past;
  };
  // What a release published. own, past: as in Known, for the wave that released.
  struct Entry {
    uint32_t number, own, past, count, all;    // all: 1 if kKnown waves do not suffice
    Known known[kKnown];
  };
  Slot slots[kSlots];
  uint32_t entries;
  Entry log[kLog];
};

// The lock of the checks, which all processes of a user share.
struct Common {
  pthread_mutex_t mutex;
  uint64_t version;
};

std::atomic<bool> g_sharing{false};

template <class T>
T* map_file(int fd) {
  void* at = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
}

// Opens the file with the common lock. It is never deleted, so that later processes use the same
// one. If a process dies while it holds the lock, the next process gets the lock.
Common* open_common() {
  char path[64];
  std::snprintf(path, sizeof path, "/dev/shm/ark-emulated-checks-%u", getuid());
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return nullptr;
  flock(fd, LOCK_EX);
  struct stat facts{};
  const bool fresh = fstat(fd, &facts) == 0 && facts.st_size == 0;
  Common* common = nullptr;
  if (facts.st_uid == getuid() && (!fresh || ftruncate(fd, sizeof(Common)) == 0)) {
    common = map_file<Common>(fd);
  }
  if (common != nullptr && fresh) {
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&common->mutex, &how);
  }
  flock(fd, LOCK_UN);
  close(fd);
  return common;
}

Common* common() {
  static Common* const opened = open_common();
  return opened;
}

struct Own {
  uint32_t process = 0;
  int fd = -1;
  Ledger* ledger = nullptr;
};

// Returns this process's id. It is needed at every access, so it is read once, and again in a child
// of fork.
uint32_t own_process() {
  static std::atomic<uint32_t> known{0};
  if (const uint32_t found = known.load(std::memory_order_relaxed)) return found;
  static const int forgets = pthread_atfork(nullptr, nullptr, [] { known = 0; });
  if (forgets == 0) known = static_cast<uint32_t>(getpid());
  return static_cast<uint32_t>(getpid());
}

// This process's own ledger. A child of fork creates another one.
Own& own() {
  static Own mine;
  const uint32_t process = own_process();
  if (mine.process == process) return mine;
  mine.process = process;
  mine.fd = memfd_create("ark-emulated-ledger", MFD_CLOEXEC);
  const bool made = mine.fd >= 0 && ftruncate(mine.fd, sizeof(Ledger)) == 0;
  mine.ledger = made ? map_file<Ledger>(mine.fd) : nullptr;
  return mine;
}

// Returns the ledger of a process, or null if that process has ended.
const Ledger* ledger_of(uint32_t process, int32_t fd) {
  if (process == own().process) return own().ledger;
  static std::map<uint32_t, const Ledger*> opened;
  const auto [known, fresh] = opened.try_emplace(process, nullptr);
  if (!fresh) return known->second;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%u/fd/%d", process, fd);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  struct stat facts{};
  if (file >= 0 && fstat(file, &facts) == 0 && facts.st_size == sizeof(Ledger)) {
    known->second = map_file<Ledger>(file);
  }
  if (file >= 0) close(file);
  return known->second;
}

// Waves of other processes have slots in this process too, called proxies.
struct Proxies {
  std::map<uint64_t, uint32_t> slots;                 // (process, slot) -> slot here
  std::map<uint32_t, Ledger::Known> waves;            // and back
};
Proxies& proxies() {
  static Proxies known;
  return known;
}

uint32_t slot_for(uint32_t process, int32_t ledger, uint32_t slot) {
  if (process == own().process) return slot;
  Proxies& all = proxies();
  const auto [at, fresh] = all.slots.try_emplace(uint64_t{process} << 32 | slot, 0);
  if (!fresh) return at->second;
  World& world = World::get();
  at->second = static_cast<uint32_t>(world.slots.size());
  SlotHistory& history = world.slots.emplace_back();
  history.grid = ~0u;
  history.device = -1;
  history.live = true;
  all.waves[at->second] = {process, ledger, slot, 0, 0};
  return at->second;
}

const Ledger::Entry* entry_of(const SharedRecord& record) {
  const Ledger* ledger = ledger_of(record.process, record.ledger);
  if (ledger == nullptr || record.release == 0) return nullptr;
  const Ledger::Entry& entry = ledger->log[record.release % kLog];
  return entry.number == record.release ? &entry : nullptr;
}

// Copies a release of another process to this process: the writer's proxy, `slot`, then counts as
// having released the same accesses as the writer.
void import_release(const SharedRecord& record, uint32_t slot) {
  auto& records = World::get().slots[slot].records;
  const auto later = std::upper_bound(
      records.begin(), records.end(), record.epoch,
      [](uint32_t epoch, const ReleaseRecord& r) { return epoch < r.time; });
  if (later != records.begin() && (later - 1)->time == record.epoch) return;
  Published what{0, std::make_shared<Clock>()}, past{0, std::make_shared<Clock>()};
  const Ledger::Entry* entry = entry_of(record);
  if (entry == nullptr || entry->all != 0) {
    // The record is too old or too large to be read. The release then counts as covering all
    // accesses, so a race may be missed.
    what.own = record.epoch;
    for (const auto& [here, wave] : proxies().waves) raise_clock(what.seen, here, ~0u);
    past = what;
  } else {
    what.own = entry->own;
    past.own = entry->past;
    for (uint32_t k = 0; k < entry->count; k++) {
      const Ledger::Known& known = entry->known[k];
      const uint32_t here = slot_for(known.process, known.ledger, known.slot);
      raise_clock(what.seen, here, known.epoch);
      raise_clock(past.seen, here, known.past);
    }
  }
  const Published nothing{0, std::make_shared<Clock>()};
  auto& to = World::get().slots[slot].records;   // slot_for may have moved it
  const auto place = std::upper_bound(
      to.begin(), to.end(), record.epoch,
      [](uint32_t epoch, const ReleaseRecord& r) { return epoch < r.time; });
  to.insert(place, {record.epoch, what, what, what, nothing, nothing.seen, past});
  if (to.size() > kMaxRecords) to.pop_front();
}

Record imported(const SharedRecord& record) {
  const uint32_t slot = slot_for(record.process, record.ledger, record.slot);
  const bool foreign = record.process != own().process;
  if (foreign && record.release != 0) import_release(record, slot);
  return {slot, record.epoch, foreign ? 0 : record.pc, record.bytes, record.stamp, 0};
}

// Records what the wave has released to all devices. If the flag is updated by a read-modify-write,
// this includes what earlier writers of the flag had released.
uint32_t publish(WaveChecks& c, const SharedRecord* before) {
  Ledger& ledger = *own().ledger;
  const Published& what = c.released_system;
  const Published own_past = World::get().slots[c.slot].records.back().past;
  const bool same = c.told.seen == what.seen && c.told.own == what.own &&
                    c.told_past.seen == own_past.seen && c.told_past.own == own_past.own;
  if (before == nullptr && same && c.told_as != 0) return c.told_as;
  const uint32_t number = ++ledger.entries;
  Ledger::Entry& entry = ledger.log[number % kLog];
  SharedClock seen = std::make_shared<Clock>(*what.seen);
  SharedClock past = std::make_shared<Clock>(*own_past.seen);
  bool all = false;
  if (before != nullptr) {
    const uint32_t slot = slot_for(before->process, before->ledger, before->slot);
    const Ledger::Entry* earlier = entry_of(*before);
    all = earlier == nullptr || earlier->all != 0;
    if (!all) {
      for (uint32_t k = 0; k < earlier->count; k++) {
        const Ledger::Known& known = earlier->known[k];
        const uint32_t here = slot_for(known.process, known.ledger, known.slot);
        raise_clock(seen, here, known.epoch);
        raise_clock(past, here, known.past);
      }
      raise_clock(seen, slot, std::min(earlier->own, before->epoch));
      raise_clock(past, slot, std::min(earlier->past, before->epoch));
    }
  }
  entry.number = number;
  entry.own = what.own;
  entry.past = own_past.own;
  entry.count = 0;
  for (uint32_t slot = 0; slot < std::max(seen->size(), past->size()) && !all; slot++) {
    const uint32_t upto = clock_at(seen, slot), over = clock_at(past, slot);
    if ((upto == 0 && over == 0) || slot == c.slot) continue;
    const auto wave = proxies().waves.find(slot);
    Ledger::Known known{own().process, own().fd, slot, upto, over};
    if (wave != proxies().waves.end()) {
      known = wave->second;
      known.epoch = upto;
      known.past = over;
    }
    all = entry.count == kKnown;
    if (!all) entry.known[entry.count++] = known;
  }
  entry.all = all;
  if (before == nullptr) {
    c.told = what;
    c.told_past = own_past;
    c.told_as = number;
  }
  return number;
}

template <size_t n>
void drop(SharedRecord (&records)[n], uint8_t bytes) {
  for (SharedRecord& r : records) {
    r.bytes &= static_cast<uint8_t>(~bytes);
    if (r.bytes == 0) r.process = 0;
  }
}

template <size_t n>
void put(SharedRecord (&records)[n], const SharedRecord& fresh) {
  SharedRecord* place = nullptr;
  for (SharedRecord& r : records) {
    const bool same = r.process == fresh.process && r.slot == fresh.slot && r.stamp == fresh.stamp;
    if (same) place = &r;
    if (r.process == 0 && place == nullptr) place = &r;
  }
  if (place == nullptr) return;   // without a record a race may be missed
  const uint8_t bytes = place->process == 0 ? 0 : place->bytes;
  *place = fresh;
  place->bytes |= bytes;
}

}  // namespace

bool sharing() { return g_sharing.load(std::memory_order_relaxed); }

bool can_share_checks() {
  if (common() == nullptr || own().ledger == nullptr) return false;
  g_sharing = true;
  return true;
}

SharedLock::SharedLock() {
  if (pthread_mutex_lock(&common()->mutex) == EOWNERDEAD) {
    pthread_mutex_consistent(&common()->mutex);
  }
}

SharedLock::~SharedLock() { pthread_mutex_unlock(&common()->mutex); }

uint64_t world_time() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void ledger_begin(uint32_t slot, uint32_t epoch) {
  Ledger* ledger = own().ledger;
  if (ledger == nullptr || slot >= kSlots) return;
  ledger->slots[slot].start = epoch;
  ledger->slots[slot].live = 1;
}

void ledger_end(uint32_t slot) {
  Ledger* ledger = own().ledger;
  if (ledger == nullptr || slot >= kSlots) return;
  ledger->slots[slot].ended = world_time();
  ledger->slots[slot].live = 0;
}

bool ended_before(uint32_t slot, uint32_t epoch, uint64_t started) {
  const auto found = proxies().waves.find(slot);
  if (found == proxies().waves.end()) return false;
  const Ledger::Known& wave = found->second;
  const Ledger* ledger = ledger_of(wave.process, wave.ledger);
  if (ledger == nullptr || wave.slot >= kSlots) return true;
  const Ledger::Slot& there = ledger->slots[wave.slot];
  const bool ended = there.live == 0 || epoch < there.start;
  return ended && there.ended < started;
}

namespace {

// Marks bytes that other processes wrote as initialised.
void mark_written(ShadowPages& shadow, uint64_t index, uint8_t bytes) {
  if (!shadow.track_init) return;
  shadow.initialised.prepare(shadow.size);
  for (uint64_t k = 0; k < 4 && index * 4 + k < shadow.size; k++) {
    if (((bytes >> k) & 1) != 0) shadow.initialised.add(index * 4 + k, 1);
  }
}

void import_cell(ShadowPages& shadow, uint64_t index, CellState& cell) {
  const SharedCell& there = shadow.shared[index];
  if (there.version == cell.version) return;
  cell.version = there.version;
  if (there.by == own().process) return;
  cell.writes.clear();
  cell.reads.clear();
  cell.full = 0;
  cell.flag |= there.flag;
  for (const SharedRecord& r : there.writes) {
    if (r.process == 0) continue;
    cell.writes.push_back(imported(r));
    mark_written(shadow, index, r.bytes);
  }
  for (const SharedRecord& r : there.reads) {
    if (r.process != 0) cell.reads.push_back(imported(r));
  }
  if (there.sync.process == 0) {
    shadow.syncs.erase(index);
    return;
  }
  if (there.sync.process == own().process) return;
  const Record last = imported(there.sync);
  auto& contributors = shadow.syncs[index];
  if (!there.sync.changes) contributors.clear();
  std::erase_if(contributors, [&](const Contributor& c) { return c.slot == last.slot; });
  contributors.push_back({last.slot, last.epoch});
}

}  // namespace

void import_cells(ShadowPages& shadow, uint64_t offset, uint64_t bytes) {
  for (uint64_t k = offset / 4; k <= (offset + bytes - 1) / 4; k++) {
    import_cell(shadow, k, shadow.cell(k));
  }
}

void export_cell(Wave& w, ShadowPages& shadow, uint64_t index, const CellState& cell,
                 const Record& mine, AccessKind kind) {
  WaveChecks& c = *w.checks;
  SharedCell& there = shadow.shared[index];
  SharedRecord record{own().process, own().fd, mine.slot, mine.epoch, 0, mine.pc, mine.bytes,
                      mine.stamp, kind == AccessKind::Atomic};
  if (kind == AccessKind::Read) {
    put(there.reads, record);
  } else {
    if (mine.stamp != Stamp::Plain) {
      const bool goes_on = record.changes && there.sync.process != 0;
      record.release = publish(c, goes_on ? &there.sync : nullptr);
      there.sync = record;
    }
    drop(there.writes, mine.bytes);
    drop(there.reads, mine.bytes);
    put(there.writes, record);
  }
  there.flag |= cell.flag;
  there.by = own().process;
  there.version = ++common()->version;
}

void clear_cells(ShadowPages& shadow, uint64_t first, uint64_t last) {
  const SharedLock lock;
  last = std::min(last, (shadow.size + 3) / 4);
  constexpr uint64_t kInPage = 4096 / sizeof(SharedCell);
  for (uint64_t k = first; k < last;) {
    const uint64_t pages = (last - k) / kInPage;
    if (k % kInPage == 0 && pages > 0) {   // untouched cells take no memory
      madvise(shadow.shared + k, pages * 4096, MADV_REMOVE);
      k += pages * kInPage;
    } else {
      shadow.shared[k] = SharedCell();
      k++;
    }
  }
}

}  // namespace ark_emu
