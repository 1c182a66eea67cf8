// How the race checks of several processes exchange information about memory that the processes
// share. A separate shared-memory segment has one cell for every four bytes of that memory; a cell
// records the accesses to its bytes. Each process has a ledger, a file with the states of its waves
// and their releases. See README.md, "Checks".
#pragma once

#include <cstdint>

#include "checks_state.h"

namespace ark_emu {

// The record of an access by a wave of any process.
struct SharedRecord {
  uint32_t process = 0;                  // 0: no record
  int32_t ledger = -1;                   // descriptor of that process's ledger, in that process
  uint32_t slot = 0, epoch = 0;
  uint32_t release = 0;                  // number of the published state; 0: a plain access
  uint32_t pc = 0;
  uint8_t bytes = 0;
  Stamp stamp = Stamp::Plain;
  bool changes = false;                  // a read-modify-write, which keeps earlier releases
};

struct alignas(256) SharedCell {
  uint64_t version = 0;                  // of the last change; one counter for all processes
  uint32_t by = 0;                       // the process of the last change
  bool flag = false;
  SharedRecord sync, writes[3], reads[3];
};
static_assert(sizeof(SharedCell) == 256, "cells of a page of memory fill whole pages");

// A lock that one wave of one process holds during an access to shared memory and its records.
class SharedLock {
 public:
  SharedLock();
  ~SharedLock();
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;
};
bool sharing();                          // some memory of this process is shared

// Called under the lock. import_cell copies the accesses of other processes from the shared cells
// of these bytes. export_cell records this process's access in a shared cell.
void import_cells(ShadowPages& shadow, uint64_t offset, uint64_t bytes);
void export_cell(Wave& w, ShadowPages& shadow, uint64_t index, const CellState& cell,
                 const Record& mine, AccessKind kind);
void clear_cells(ShadowPages& shadow, uint64_t first, uint64_t last);
// True if a wave of another process had ended before the wave of this process that began at time
// `started`. `slot`: the number that stands for the other wave in this process.
bool ended_before(uint32_t slot, uint32_t epoch, uint64_t started);
// Records in the ledger that a wave begins or has ended. `world_time` counts nanoseconds on this
// machine.
void ledger_begin(uint32_t slot, uint32_t epoch);
void ledger_end(uint32_t slot);
uint64_t world_time();

}  // namespace ark_emu
