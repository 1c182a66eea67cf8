// Convolutions of images whose channels are the last dimension (NHWC). ARK_WINDOW_SPAN: the number
// of image columns that a thread reads to compute W neighbouring results of one row.

template <class WINDOW, int W>
constexpr int ARK_WINDOW_SPAN =
    (W - 1) * WINDOW::step_across + (WINDOW::across - 1) * WINDOW::apart_across + 1;

// True if one of the W results of a thread reads image column number `at`, counted from the first
// column of the first result's window.
template <class WINDOW, int W>
constexpr bool ark_window_reads(int at) {
  for (int x = 0; x < W; ++x) {
    for (int tap = 0; tap < WINDOW::across; ++tap) {
      if (x * WINDOW::step_across + tap * WINDOW::apart_across == at) return true;
    }
  }
  return false;
}
