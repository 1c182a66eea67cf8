// A model of AMD's system DMA engines: a queue is a ring of packets in memory, a write pointer, a
// read pointer and a doorbell. Kernels (or the host) write packets, then the write pointer, then
// the doorbell; the engine executes what lies between the pointers, in order. Packet layouts are
// those of SDMA 4.4, as in the Linux driver's public headers.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "agent.h"
#include "random.h"
#include "runtime.h"

namespace ark_hip {

class SdmaQueue {
 public:
  // Creates a queue. It allocates memory for the ring and, on a page of its own, for the pointers
  // and the doorbell; all of it is visible to every device.
  SdmaQueue(Runtime& rt, int device, uint64_t ring_bytes);
  ~SdmaQueue();
  SdmaQueue(const SdmaQueue&) = delete;
  SdmaQueue& operator=(const SdmaQueue&) = delete;

  uint64_t ring() const { return base_; }
  uint64_t ring_bytes() const { return ring_bytes_; }
  uint64_t write_pointer() const { return base_ + ring_bytes_; }
  uint64_t read_pointer() const { return base_ + ring_bytes_ + 64; }
  uint64_t doorbell() const { return base_ + ring_bytes_ + 128; }
  uint64_t executed() const { return executed_.load(); }

  // Executes packets until it reaches the doorbell's value, a poll whose condition is not met, or
  // an error. The emulator's seed determines how late packets are executed and into which parts
  // copies are divided. Returns true if it did anything.
  bool progress();

 private:
  // The result of executing a packet: it is complete, a part of its copy is done, its poll's
  // condition is not met, or it has failed.
  enum class Step { Done, Part, Wait, Broken };
  Step execute(uint64_t at, uint64_t available, uint64_t* length);
  uint32_t word(uint64_t at, int index) const;
  uint64_t wide(uint64_t at, int index) const {
    return word(at, index) | uint64_t(word(at, index + 1)) << 32;
  }
  bool reachable(uint64_t address, uint64_t size, const char* what);
  bool sound(const std::string& wrong);   // reports `wrong`; true if it is empty
  std::string fetched(uint64_t at, uint64_t length);
  Step copy_part(uint64_t from, uint64_t to, uint64_t size);
  void fail(const std::string& why);

  Runtime& rt_;
  int device_;
  uint64_t ring_bytes_, base_ = 0, span_ = 0;
  std::atomic<uint64_t> executed_{0};
  std::atomic<bool> broken_{false};
  std::mutex lock_;
  std::unique_ptr<ark_emu::Agent> agent_;
  ark_emu::Random random_;
  uint64_t moved_ = 0;                     // bytes that the current copy packet has copied
};

}  // namespace ark_hip
