// The metadata note of a code object is a msgpack map (LLVM AMDGPU guide, "Code object metadata").
#include <cstring>

#include "elf.h"

namespace ark_emu {
namespace {

struct Value {
  enum class Type { Nil, Int, Text, List, Map } type = Type::Nil;
  uint64_t number = 0;
  std::string text;
  std::vector<Value> list;                              // Map: keys and values in turn
  const Value* get(std::string_view key) const {
    for (size_t k = 0; type == Type::Map && k + 1 < list.size(); k += 2) {
      if (list[k].text == key) return &list[k + 1];
    }
    return nullptr;
  }
  uint32_t int_at(std::string_view key) const {
    const Value* found = get(key);
    return found == nullptr ? 0 : static_cast<uint32_t>(found->number);
  }
  std::string text_at(std::string_view key) const {
    const Value* found = get(key);
    return found == nullptr ? std::string() : found->text;
  }
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  Value value(int depth = 0) {
    if (depth > 32) fail();
    const uint8_t tag = static_cast<uint8_t>(number(1));
    Value v;
    if (tag < 0x80 || tag >= 0xe0) {
      v.type = Value::Type::Int;
      v.number = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(tag)));
    } else if (tag < 0x90) {
      items(v, Value::Type::Map, 2ull * (tag & 15), depth);
    } else if (tag < 0xa0) {
      items(v, Value::Type::List, tag & 15, depth);
    } else if (tag < 0xc0) {
      text(v, tag & 31);
    } else {
      tagged(v, tag, depth);
    }
    return v;
  }

 private:
  [[noreturn]] static void fail() {
    throw Error("the code object's metadata note is cut short or is not msgpack");
  }

  uint64_t number(size_t width) {   // big endian
    if (at_ + width > bytes_.size()) fail();
    uint64_t n = 0;
    for (size_t k = 0; k < width; k++) n = n << 8 | bytes_[at_++];
    return n;
  }

  void text(Value& v, uint64_t size) {
    if (size > bytes_.size() - at_) fail();
    v.type = Value::Type::Text;
    v.text.assign(reinterpret_cast<const char*>(bytes_.data()) + at_, size);
    at_ += size;
  }

  void items(Value& v, Value::Type type, uint64_t count, int depth) {
    if (count > bytes_.size() - at_) fail();
    v.type = type;
    for (uint64_t k = 0; k < count; k++) v.list.push_back(value(depth + 1));
  }

  void tagged(Value& v, uint8_t tag, int depth) {
    switch (tag) {
      case 0xc0: return;
      case 0xc2: case 0xc3:
        v.type = Value::Type::Int;
        v.number = tag == 0xc3 ? 1 : 0;
        return;
      case 0xc4: case 0xc5: case 0xc6: text(v, number(size_t{1} << (tag - 0xc4))); return;
      case 0xcc: case 0xcd: case 0xce: case 0xcf:
        v.type = Value::Type::Int;
        v.number = number(size_t{1} << (tag - 0xcc));
        return;
      case 0xd0: case 0xd1: case 0xd2: case 0xd3:
        v.type = Value::Type::Int;
        v.number = number(size_t{1} << (tag - 0xd0));
        return;
      case 0xd9: case 0xda: case 0xdb: text(v, number(size_t{1} << (tag - 0xd9))); return;
      case 0xdc: case 0xdd:
        items(v, Value::Type::List, number(tag == 0xdc ? 2 : 4), depth);
        return;
      case 0xde: case 0xdf:
        items(v, Value::Type::Map, 2 * number(tag == 0xde ? 2 : 4), depth);
        return;
      default: fail();
    }
  }

  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

}  // namespace

std::vector<KernelInfo> read_metadata(std::span<const uint8_t> msgpack) {
  const Value root = Reader(msgpack).value();
  std::vector<KernelInfo> kernels;
  const Value* list = root.get("amdhsa.kernels");
  if (list == nullptr) return kernels;
  for (const Value& entry : list->list) {
    KernelInfo k;
    k.name = entry.text_at(".name");
    k.kernarg_size = entry.int_at(".kernarg_segment_size");
    k.kernarg_align = entry.int_at(".kernarg_segment_align");
    k.lds_bytes = entry.int_at(".group_segment_fixed_size");
    k.scratch_bytes = entry.int_at(".private_segment_fixed_size");
    if (entry.int_at(".uses_dynamic_stack") != 0) k.scratch_bytes += 16384;
    k.vgprs = entry.int_at(".vgpr_count");
    k.agprs = entry.int_at(".agpr_count");
    k.sgprs = entry.int_at(".sgpr_count");
    k.vgpr_spills = entry.int_at(".vgpr_spill_count");
    k.sgpr_spills = entry.int_at(".sgpr_spill_count");
    k.max_flat_workgroup = entry.int_at(".max_flat_workgroup_size");
    k.wave_size = static_cast<int>(entry.int_at(".wavefront_size"));
    if (const Value* args = entry.get(".args"); args != nullptr) {
      for (const Value& arg : args->list) {
        k.args.push_back({arg.text_at(".name"), arg.text_at(".value_kind"),
                          arg.text_at(".address_space"), arg.int_at(".offset"),
                          arg.int_at(".size")});
      }
    }
    kernels.push_back(std::move(k));
  }
  return kernels;
}

}  // namespace ark_emu
