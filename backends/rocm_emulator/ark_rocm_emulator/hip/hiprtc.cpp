// The hiprtc entry points. The compilation itself is done by the package's compile step (clang from
// the ziglang wheel). Python registers this step as a function when it activates the emulator.
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime.h"

enum hiprtcResult : int {
  HIPRTC_SUCCESS = 0,
  HIPRTC_ERROR_OUT_OF_MEMORY = 1,
  HIPRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
  HIPRTC_ERROR_INVALID_INPUT = 3,
  HIPRTC_ERROR_INVALID_PROGRAM = 4,
  HIPRTC_ERROR_INVALID_OPTION = 5,
  HIPRTC_ERROR_COMPILATION = 6,
  HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE = 7,
  HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
  HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
  HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
  HIPRTC_ERROR_INTERNAL_ERROR = 11,
};

namespace {

struct Program {
  std::string source, name, log;
  std::vector<std::string> header_names, header_texts;
  std::vector<uint8_t> code;
};

// The function that compiles a program. Its parameters are the source, the options, and the headers
// as (name, text) pairs, in null-terminated lists. It returns the result through
// ark_emulator_compiled.
using CompileFunction = int (*)(void* program, const char* source, const char* arch,
                                const char** options, const char** headers);
std::mutex g_lock;
CompileFunction g_compile = nullptr;
std::map<void*, std::unique_ptr<Program>> g_programs;

Program* known(void* handle) {
  std::lock_guard<std::mutex> hold(g_lock);
  auto found = g_programs.find(handle);
  return found == g_programs.end() ? nullptr : found->second.get();
}

const char* kWords[] = {
    "HIPRTC_SUCCESS",
    "HIPRTC_ERROR_OUT_OF_MEMORY",
    "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE",
    "HIPRTC_ERROR_INVALID_INPUT",
    "HIPRTC_ERROR_INVALID_PROGRAM",
    "HIPRTC_ERROR_INVALID_OPTION",
    "HIPRTC_ERROR_COMPILATION",
    "HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    "HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    "HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "HIPRTC_ERROR_INTERNAL_ERROR",
};

}  // namespace

HIP_EXPORT void ark_emulator_set_compiler(CompileFunction compile) { g_compile = compile; }

// Called by the compile function: receives the code object (none if the compilation failed) and the
// compiler's output.
HIP_EXPORT void ark_emulator_compiled(void* handle, const uint8_t* code, size_t size,
                                      const char* log) {
  Program* program = known(handle);
  if (!program) return;
  program->code.assign(code, code + size);
  program->log = log;
}

HIP_EXPORT const char* hiprtcGetErrorString(hiprtcResult result) {
  return size_t(result) < std::size(kWords) ? kWords[result] : "Invalid HIPRTC error code";
}

HIP_EXPORT hiprtcResult hiprtcVersion(int* major, int* minor) {
  if (!major || !minor) return HIPRTC_ERROR_INVALID_INPUT;
  *major = 9;  // hiprtc has always reported version 9.0
  *minor = 0;
  return HIPRTC_SUCCESS;
}

HIP_EXPORT hiprtcResult hiprtcCreateProgram(void** handle, const char* source, const char* name,
                                            int headers, const char** texts, const char** names) {
  if (!handle || headers < 0 || (headers && (!texts || !names))) return HIPRTC_ERROR_INVALID_INPUT;
  if (!source) return HIPRTC_ERROR_INVALID_PROGRAM;
  auto program = std::make_unique<Program>();
  program->source = source;
  program->name = name ? name : "";
  for (int k = 0; k < headers; ++k) {
    program->header_names.push_back(names[k]);
    program->header_texts.push_back(texts[k]);
  }
  *handle = program.get();
  std::lock_guard<std::mutex> hold(g_lock);
  g_programs[*handle] = std::move(program);
  return HIPRTC_SUCCESS;
}

HIP_EXPORT hiprtcResult hiprtcDestroyProgram(void** handle) {
  if (!handle) return HIPRTC_ERROR_INVALID_INPUT;
  std::lock_guard<std::mutex> hold(g_lock);
  if (!g_programs.erase(*handle)) return HIPRTC_ERROR_INVALID_PROGRAM;
  *handle = nullptr;
  return HIPRTC_SUCCESS;
}

HIP_EXPORT hiprtcResult hiprtcCompileProgram(void* handle, int count, const char** options) {
  Program* program = known(handle);
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (count < 0 || (count && !options)) return HIPRTC_ERROR_INVALID_INPUT;
  if (!g_compile) return HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE;
  std::string arch;
  std::vector<const char*> rest, headers;
  for (int k = 0; k < count; ++k) {
    std::string option = options[k];
    const char* known_as[] = {"--offload-arch=", "--gpu-architecture=", "-arch="};
    bool names_arch = false;
    for (const char* prefix : known_as)
      if (option.compare(0, strlen(prefix), prefix) == 0) {
        arch = option.substr(strlen(prefix));
        names_arch = true;
      }
    if (!names_arch) rest.push_back(options[k]);
  }
  if (arch.empty()) {
    ark_hip::Runtime* rt = ark_hip::runtime();
    if (!rt) return HIPRTC_ERROR_INVALID_OPTION;
    arch = ark_emu::arch_name(rt->devices[size_t(ark_hip::current_device)]->arch);
  }
  for (size_t k = 0; k < program->header_names.size(); ++k) {
    headers.push_back(program->header_names[k].c_str());
    headers.push_back(program->header_texts[k].c_str());
  }
  rest.push_back(nullptr);
  headers.push_back(nullptr);
  int done = g_compile(handle, program->source.c_str(), arch.c_str(), rest.data(), headers.data());
  return done == 0 ? HIPRTC_SUCCESS : HIPRTC_ERROR_COMPILATION;
}

HIP_EXPORT hiprtcResult hiprtcGetProgramLogSize(void* handle, size_t* size) {
  Program* program = known(handle);
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (!size) return HIPRTC_ERROR_INVALID_INPUT;
  *size = program->log.size() + 1;
  return HIPRTC_SUCCESS;
}

HIP_EXPORT hiprtcResult hiprtcGetProgramLog(void* handle, char* log) {
  Program* program = known(handle);
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (!log) return HIPRTC_ERROR_INVALID_INPUT;
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return HIPRTC_SUCCESS;
}

HIP_EXPORT hiprtcResult hiprtcGetCodeSize(void* handle, size_t* size) {
  Program* program = known(handle);
  if (!program || program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (!size) return HIPRTC_ERROR_INVALID_INPUT;
  *size = program->code.size();
  return HIPRTC_SUCCESS;
}

HIP_EXPORT hiprtcResult hiprtcGetCode(void* handle, char* code) {
  Program* program = known(handle);
  if (!program || program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (!code) return HIPRTC_ERROR_INVALID_INPUT;
  memcpy(code, program->code.data(), program->code.size());
  return HIPRTC_SUCCESS;
}
