// The steps of an all-reduce around a ring. Each function processes one tile of the elements. This
// text is compiled unmodified for every vendor; docs/custom-ops.md lists the functions that it may
// use.

// The first step: this rank's share of the mean is put to the next rank.
template <class Task, class X, class Y>
ARK_DEVICE void scale_and_put(ArkCtx& c, const Task& task, X x, Y there) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    ark_store(c, there, ark_load(c, x, m) * Task::by, m);
  }
}

// A middle step: passes the data from the previous rank on and adds it to the total.
template <class Task, class G, class T, class Y>
ARK_DEVICE void add_and_forward(ArkCtx& c, const Task& task, G got, T total, Y there) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    const float v = ark_load(c, got, m);
    ark_store(c, there, v, m);
    ark_store(c, total, ark_load(c, total, m) + v, m);
  }
}

// The last step: adds the data from the previous rank to the total.
template <class Task, class G, class T>
ARK_DEVICE void add(ArkCtx& c, const Task& task, G got, T total) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    ark_store(c, total, ark_load(c, total, m) + ark_load(c, got, m), m);
  }
}
