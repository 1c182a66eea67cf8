// The records of accesses to a cell, for the race checks. Most cells have one record of each kind,
// which is stored in place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace ark_emu {

// The kind of a recorded access. MaybeAtomic: a store by an instruction that is used for plain and
// for atomic stores. Dma: a load that writes LDS directly.
enum class Stamp : uint8_t { Plain, MaybeAtomic, Atomic, Dma };

struct Record {
  uint32_t slot = 0, epoch = 0;
  uint32_t pc = 0;
  uint8_t bytes = 0;                     // mask of the cell's four bytes; 0: no record
  Stamp stamp = Stamp::Plain;
  uint32_t sequence = 0;                 // Dma: the wave's vector-memory sequence number
};

class Records {
 public:
  Records() = default;
  ~Records() { delete[] more_; }
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  Record* begin() { return more_ != nullptr ? more_ : &one_; }
  Record* end() { return begin() + size_; }
  const Record* begin() const { return more_ != nullptr ? more_ : &one_; }
  const Record* end() const { return begin() + size_; }
  Record& operator[](size_t index) { return begin()[index]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  void clear() { size_ = 0; }
  void push_back(const Record& record) {
    if (size_ == capacity_) grow();
    begin()[size_++] = record;
  }
  // Removes the records for which `unwanted` returns true. It may change the others.
  template <class F>
  void remove(F unwanted) {
    size_ = static_cast<uint16_t>(std::remove_if(begin(), end(), unwanted) - begin());
  }

 private:
  void grow() {
    Record* wider = new Record[size_t{capacity_} * 2];
    std::copy(begin(), end(), wider);
    delete[] std::exchange(more_, wider);
    capacity_ = static_cast<uint16_t>(capacity_ * 2);
  }
  Record* more_ = nullptr;               // null while one record suffices
  Record one_;
  uint16_t size_ = 0, capacity_ = 1;
};

}  // namespace ark_emu
