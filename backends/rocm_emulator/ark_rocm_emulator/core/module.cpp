// The Python module of the emulator core: devices, memory, code objects and launches. Used by
// tests, benchmarks and tools that do not need HIP.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <tuple>

#include "decode.h"
#include "engine.h"

namespace py = pybind11;

namespace ark_emu {
namespace {

constexpr std::pair<const char*, MemKind> kKinds[] = {
    {"device", MemKind::Device}, {"fine", MemKind::Fine}, {"uncached", MemKind::Uncached},
    {"host", MemKind::Host}};

MemKind kind_of(const std::string& name) {
  for (const auto& [text, kind] : kKinds) {
    if (name == text) return kind;
  }
  throw Error("'" + name + "' is not a kind of memory; expected device, fine, uncached or host");
}

std::span<const uint8_t> bytes_of(const py::bytes& data) {
  const std::string_view view = data;
  return {reinterpret_cast<const uint8_t*>(view.data()), view.size()};
}

// Checks that the bytes are in one region, so that a wrong address becomes an exception instead of
// a crash.
void check_range(const Machine& machine, uint64_t address, uint64_t size) {
  Region region;
  if (machine.find_region(address, &region) && size <= region.size &&
      address - region.base <= region.size - size) {
    return;
  }
  throw Error("no memory of the machine holds " + std::to_string(size) + " bytes at address " +
              std::to_string(address));
}

LaunchDesc describe(std::shared_ptr<LoadedCode> code, std::string kernel,
                    std::array<uint32_t, 3> grid, std::array<uint32_t, 3> block,
                    const py::bytes& arguments, uint32_t dynamic_lds,
                    const LaunchOptions& options) {
  LaunchDesc desc;
  desc.code = std::move(code);
  desc.kernel = std::move(kernel);
  desc.grid = {grid[0], grid[1], grid[2]};
  desc.block = {block[0], block[1], block[2]};
  desc.dynamic_lds = dynamic_lds;
  const std::span<const uint8_t> raw = bytes_of(arguments);
  desc.kernarg.assign(raw.begin(), raw.end());
  desc.options = options;
  return desc;
}

// Decodes and prints the instructions in `words` one after the other. Each result has the number of
// dwords used (0 if the instruction is unknown), the text, and whether the emulator executes it.
std::vector<std::tuple<uint32_t, std::string, bool>> disassemble_words(
    const std::string& arch_text, const std::vector<uint32_t>& words) {
  const Arch arch = arch_from_name(arch_text);
  const Decoder& decoder = decoder_for(arch);
  std::vector<std::tuple<uint32_t, std::string, bool>> lines;
  for (size_t at = 0; at < words.size();) {
    const Inst inst = decoder.decode(std::span(words).subspan(at), static_cast<uint32_t>(at));
    const uint32_t length = inst.op == nullptr ? 0 : inst.next - inst.pc;
    lines.emplace_back(length, disassemble(inst, arch), inst.run != unknown_opcode);
    at += length == 0 ? 1 : length;
  }
  return lines;
}

void bind_values(py::module_& m) {
  py::class_<KernelArg>(m, "KernelArg")
      .def_readonly("name", &KernelArg::name)
      .def_readonly("value_kind", &KernelArg::value_kind)
      .def_readonly("offset", &KernelArg::offset)
      .def_readonly("size", &KernelArg::size);
  py::class_<KernelInfo>(m, "KernelInfo")
      .def_readonly("name", &KernelInfo::name)
      .def_readonly("kernarg_size", &KernelInfo::kernarg_size)
      .def_readonly("lds", &KernelInfo::lds_bytes)
      .def_readonly("scratch", &KernelInfo::scratch_bytes)
      .def_readonly("vgprs", &KernelInfo::vgprs)
      .def_readonly("agprs", &KernelInfo::agprs)
      .def_readonly("sgprs", &KernelInfo::sgprs)
      .def_readonly("wave_size", &KernelInfo::wave_size)
      .def_readonly("args", &KernelInfo::args);
  py::class_<WaveWhere>(m, "WaveWhere")
      .def_property_readonly("workgroup",
                             [](const WaveWhere& w) {
                               return py::make_tuple(w.workgroup[0], w.workgroup[1],
                                                     w.workgroup[2]);
                             })
      .def_readonly("wave", &WaveWhere::wave)
      .def_readonly("pc", &WaveWhere::pc)
      .def_readonly("function", &WaveWhere::function)
      .def_readonly("line", &WaveWhere::line)
      .def_readonly("state", &WaveWhere::state);
  py::class_<LaunchResult>(m, "LaunchResult")
      .def_property_readonly("ok", &LaunchResult::ok)
      .def_property_readonly("kind",
                             [](const LaunchResult& r) { return error_kind_name(r.kind); })
      .def_readonly("message", &LaunchResult::message)
      .def_readonly("where", &LaunchResult::where)
      .def_readonly("lane", &LaunchResult::lane)
      .def_readonly("address", &LaunchResult::address)
      .def_readonly("waves", &LaunchResult::waves)
      .def_readonly("instructions", &LaunchResult::instructions)
      .def_readonly("seconds", &LaunchResult::seconds);
  py::class_<LaunchOptions>(m, "LaunchOptions")
      .def(py::init([](uint64_t seed, bool checks, bool stale, bool parallel, uint32_t max_slice,
                       uint64_t step_budget, uint32_t external_wait_ms) {
             LaunchOptions options;
             options.seed = seed;
             options.checks = checks;
             options.stale = stale;
             options.parallel = parallel;
             options.max_slice = max_slice;
             options.step_budget = step_budget;
             options.external_wait_ms = external_wait_ms;
             return options;
           }),
           py::kw_only(), py::arg("seed") = 0, py::arg("checks") = false,
           py::arg("stale") = false, py::arg("parallel") = true, py::arg("max_slice") = 256,
           py::arg("step_budget") = 0, py::arg("external_wait_ms") = 30000);
}

void bind_machine(py::module_& m) {
  py::class_<CodeObject, std::shared_ptr<CodeObject>>(m, "CodeObject")
      .def(py::init([](const py::bytes& data) { return CodeObject::from_bytes(bytes_of(data)); }))
      .def_property_readonly("arch", [](const CodeObject& c) { return arch_name(c.arch()); })
      .def_property_readonly("kernels", &CodeObject::kernels)
      .def("disassemble", &CodeObject::disassemble, py::arg("function") = "");
  py::class_<LoadedCode, std::shared_ptr<LoadedCode>>(m, "LoadedCode")
      .def_property_readonly("device", &LoadedCode::device)
      .def("address_of", &LoadedCode::address_of);
  py::class_<LaunchDesc>(m, "LaunchDesc")
      .def(py::init(&describe), py::arg("code"), py::arg("kernel"), py::arg("grid"),
           py::arg("block"), py::arg("arguments"), py::arg("dynamic_lds") = 0,
           py::arg("options") = LaunchOptions());
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Launch, std::shared_ptr<Launch>>(m, "Launch")
      .def("done", &Launch::done)
      .def("wait", [](Launch& launch) { return launch.wait(); }, no_gil)
      .def("wait_for_ms", &Launch::wait_for_ms, no_gil)
      .def("cancel", &Launch::cancel, no_gil);
  py::class_<Machine, std::shared_ptr<Machine>>(m, "Machine")
      .def(py::init([](const std::vector<std::string>& names) {
        std::vector<Arch> devices;
        for (const std::string& name : names) devices.push_back(arch_from_name(name));
        return Machine::create(devices);
      }))
      .def("allocate",
           [](Machine& machine, int device, const std::string& kind, uint64_t size,
              std::string name) {
             return machine.allocate(device, kind_of(kind), size, std::move(name));
           },
           py::arg("device"), py::arg("kind"), py::arg("size"), py::arg("name") = "")
      .def("release", &Machine::release)
      .def("set_access", &Machine::set_access)
      .def("write",
           [](Machine& machine, uint64_t address, const py::bytes& data) {
             const std::span<const uint8_t> raw = bytes_of(data);
             check_range(machine, address, raw.size());
             std::memcpy(reinterpret_cast<void*>(address), raw.data(), raw.size());
             machine.host_wrote(address, raw.size());
           })
      .def("read",
           [](Machine& machine, uint64_t address, uint64_t size) {
             check_range(machine, address, size);
             return py::bytes(reinterpret_cast<const char*>(address), size);
           })
      .def("load", &Machine::load_on_device, py::arg("code"), py::arg("device") = 0)
      .def("launch", &Machine::launch)
      .def("run", [](Machine& machine, LaunchDesc desc) {
        return machine.launch(std::move(desc))->wait();
      }, no_gil)
      .def("run_together", &Machine::run_together, py::arg("launches"), py::arg("seed") = 0,
           no_gil);
}

}  // namespace
}  // namespace ark_emu

PYBIND11_MODULE(_ark_emu, m) {
  m.doc() = "AMD machine code interpreted on the CPU.";
  py::register_exception<ark_emu::Error>(m, "Error", PyExc_ValueError);
  ark_emu::bind_values(m);
  ark_emu::bind_machine(m);
  m.def("disassemble_words", &ark_emu::disassemble_words, py::arg("arch"), py::arg("words"));
}
