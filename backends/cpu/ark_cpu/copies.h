// Copies with memcpy by the calling thread. All memory belongs to this process or is mapped into
// it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

class Copies {
 public:
  Copies(const std::string&, int) {}
  void open() {}
  void start(uint64_t target, uint64_t source, uint64_t size) {
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), size);
    ++done_;
  }
  uint32_t completed() const { return done_; }
  void close() { done_ = 0; }

 private:
  uint32_t done_ = 0;
};
