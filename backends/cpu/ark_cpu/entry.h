// The loop kernel's entry point on a CPU. Each processor of the plan is one thread, and all threads
// run at once. The calling thread runs processor 0. The other threads have stacks of
// ARK_STACK_BYTES bytes, whatever stack limit the user has set. look: a function that the calling
// thread calls from time to time while it waits, or null.

constexpr size_t ARK_STACK_BYTES = size_t{8} << 20;

struct ArkWorker {
  const ArkParams* params;
  ark_u32 processor;
  pthread_t thread;
  ark_u32 ended;
};

static void* ark_work(void* given) {
  ArkWorker* worker = static_cast<ArkWorker*>(given);
  void* scratch = aligned_alloc(64, (ARK_SCRATCH_BYTES + 127) / 64 * 64);
  ark_run(worker->params, worker->processor, static_cast<char*>(scratch));
  free(scratch);
  ark_store_host(&worker->ended, 1u);
  return nullptr;
}

extern "C" int ark_loop(const ArkParams* params, int processors, void (*look)()) {
  ark_look = look;
  ArkWorker* workers = static_cast<ArkWorker*>(calloc(processors, sizeof(ArkWorker)));
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, ARK_STACK_BYTES);
  int running = 1;
  for (; workers != nullptr && running < processors; ++running) {
    ArkWorker& worker = workers[running];
    worker.params = params;
    worker.processor = static_cast<ark_u32>(running);
    if (pthread_create(&worker.thread, &attributes, ark_work, &worker) != 0) break;
  }
  pthread_attr_destroy(&attributes);
  const bool all = workers != nullptr && running == processors;
  ArkWorker first{params, 0u, {}, 0u};
  if (all) {
    ark_work(&first);
  } else {
    // Here the system could not start all threads. The loop kernel works only if all processors run
    // at once, so the abort word is set, which makes the threads that have started return.
    ark_add_release(&ark_control(params)->abort, 1u, false);
  }
  while (--running > 0) {
    for (ark_u32 spins = 0u; look != nullptr && ark_load_host(&workers[running].ended) == 0u;) {
      ark_pause(++spins);
    }
    pthread_join(workers[running].thread, nullptr);
  }
  ark_look = nullptr;
  free(workers);
  return all ? 0 : 1;
}
