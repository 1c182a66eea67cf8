// The loop kernel's entry point on a CPU: one thread per processor, all running at once.

extern "C" int ark_loop(const ArkParams* params, int processors) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(processors));
  const auto work = [params](int processor) {
    void* scratch = std::aligned_alloc(64, (ARK_SCRATCH_BYTES + 127) / 64 * 64);
    ark_run(params, static_cast<ark_u32>(processor), static_cast<char*>(scratch));
    std::free(scratch);
  };
  try {
    for (int i = 1; i < processors; ++i) threads.emplace_back(work, i);
  } catch (const std::system_error&) {
    // Not every processor can be resident: raise the abort word so that the others leave.
    ark_add_release(&ark_control(params)->abort, 1u, false);
    for (auto& thread : threads) thread.join();
    return 1;
  }
  work(0);
  for (auto& thread : threads) thread.join();
  return 0;
}
