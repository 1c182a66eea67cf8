// Anonymous memory whose pages are allocated when they are first touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ark_emu {

class LazyPages {
 public:
  LazyPages() = default;
  LazyPages(const LazyPages&) = delete;
  LazyPages& operator=(const LazyPages&) = delete;
  ~LazyPages();
  uint8_t* map(size_t size);   // zeroed; throws Error
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ark_emu
