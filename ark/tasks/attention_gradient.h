// The gradients of attention of a tile of rows. A tile has rows of one side, either of keys and
// values or of queries and their results' gradients, and walks over the rows of the other side.
// attention_gradient.py describes operands and tasks.
//
// Let s be the scaled scores of a query row, and l the logarithm of the sum of their exponentials.
// The attention weights are p = exp(s - l). The gradient of the scores is p * (d - slope), where d
// is the dot product of the result's gradient with the value row v, and slope is the dot product of
// the result's gradient with the result.

// The rows of the other side, first to end - 1, with which row `at` of a tile is multiplied. KEYS:
// true if tiles have rows of keys.
template <class S, bool KEYS>
ARK_DEVICE int ark_gradient_first(int at) {
  return KEYS && S::CAUSAL ? (at < S::M ? at : S::M) : 0;
}
template <class S, bool KEYS>
ARK_DEVICE int ark_gradient_end(int at) {
  return KEYS ? S::M : ark_attention_end<S>(at);
}

// The shared memory of the device function that every backend can use: R rows of the tile, both
// operands; their sums; the weights and the gradients of the scores with C rows of the other side.
// If a block has one thread, it also has the other side's operands, as rows and transposed.
template <class S, int C, int R>
struct ArkGradientScratch {
  float own[2][R * S::D];
  float sum[2][R * S::D];
  float weight[R * C], slope[R * C];
  float rows[ARK_THREADS == 1 ? 2 : 1][ARK_THREADS == 1 ? C * S::D : 1];
  float turned[ARK_THREADS == 1 ? 2 : 1][ARK_THREADS == 1 ? C * S::D : 1];
};

template <class S, int C, int R, bool KEYS, class Q, class K, class V, class G, class L, class B,
          class M, class X, class Y>
ARK_DEVICE void ark_attention_gradient(ArkCtx& c, const ArkTask& t, float scale, Q query, K keys,
                                       V values, G given, L logarithms, B slopes, M mask, X first,
                                       Y second) {
  auto& s = *reinterpret_cast<ArkGradientScratch<S, C, R>*>(ARK_SCRATCH(c));
  constexpr int LENGTH = KEYS ? S::CONTEXT : S::M;
  const int batch = t.coord[0], head = t.coord[1], column = head * S::D;
  // Element d of a row of one side. which: 0 for queries or keys, 1 for the gradients of results or
  // for values.
  const auto element = [&](bool queries, int which, int row, int d) {
    if (queries) {
      return which == 0 ? ark_load(c, query, 0, batch, row, column + d)
                        : ark_load(c, given, 0, batch, row, column + d);
    }
    return which == 0 ? ark_load(c, keys, 0, batch, row, column + d)
                      : ark_load(c, values, 0, batch, row, column + d);
  };
  const auto other = [&](int which, int row, int d) { return element(KEYS, which, row, d); };
  const auto own = [&](int which, int row, int d) { return element(!KEYS, which, row, d); };
  const int last = t.coord[2] + S::ROWS < LENGTH ? t.coord[2] + S::ROWS : LENGTH;
  for (int row = t.coord[2]; row < last; row += R) {
    const int rows = row + R < last ? R : last - row;
    for (int i = ark_tid(); i < rows * S::D; i += ARK_THREADS) {
      for (int w = 0; w < 2; ++w) {
        s.own[w][i] = own(w, row + i / S::D, i % S::D);
        s.sum[w][i] = 0.0f;
      }
    }
    ark_sync();
    const int begin = ark_gradient_first<S, KEYS>(row);
    const int end = ark_gradient_end<S, KEYS>(row + rows - 1);
    for (int at = begin; at < end; at += C) {
      const int many = end - at < C ? end - at : C;
      // Stores the weight, and the gradient of the score, of row r and the e-th row of the other
      // side. score, d: the products of the first operands of both sides, and of their second
      // operands.
      const auto finish = [&](int r, int e, float score, float d) {
        const int q = KEYS ? at + e : row + r, k = KEYS ? row + r : at + e;
        float weight = 0.0f, slope = 0.0f;
        if (k < ark_attention_end<S>(q)) {
          const ArkAttentionTile tile{batch, head, 0, 0, 0, 0};
          score = ark_attention_masked<S>(mask, tile, q, k, score * scale);
          weight = ark_exp(score - ark_load(c, logarithms, 0, batch, q, head));
          slope = weight * (d - ark_load(c, slopes, 0, batch, q, head)) * scale;
        }
        s.weight[r * C + e] = weight;
        s.slope[r * C + e] = slope;
      };
      if constexpr (ARK_THREADS == 1) {
        for (int w = 0; w < 2; ++w) {
          for (int e = 0; e < C; ++e) {
            for (int d = 0; d < S::D; ++d) {
              const float v = other(w, e < many ? at + e : at, d);
              s.rows[w][e * S::D + d] = v, s.turned[w][d * C + e] = v;
            }
          }
        }
        for (int r = 0; r < rows; ++r) {
          float sums[2][C];
          for (int w = 0; w < 2; ++w) {
            for (int e = 0; e < C; ++e) sums[w][e] = 0.0f;
            for (int d = 0; d < S::D; ++d) {
              const float v = s.own[w][r * S::D + d];
              for (int e = 0; e < C; ++e) sums[w][e] += v * s.turned[w][d * C + e];
            }
          }
          for (int e = 0; e < many; ++e) finish(r, e, sums[0][e], sums[1][e]);
          for (int e = 0; e < many; ++e) {
            const float slope = s.slope[r * C + e], weight = s.weight[r * C + e];
            for (int d = 0; d < S::D; ++d)
              s.sum[0][r * S::D + d] += slope * s.rows[0][e * S::D + d];
            if (!KEYS) continue;
            for (int d = 0; d < S::D; ++d)
              s.sum[1][r * S::D + d] += weight * s.rows[1][e * S::D + d];
          }
        }
      } else {
        for (int i = ark_tid(); i < rows * C; i += ARK_THREADS) {
          const int r = i / C, e = i % C;
          if (e >= many) continue;
          float score = 0.0f, product = 0.0f;
          for (int d = 0; d < S::D; ++d) {
            score += s.own[0][r * S::D + d] * other(0, at + e, d);
            product += s.own[1][r * S::D + d] * other(1, at + e, d);
          }
          finish(r, e, score, product);
        }
        ark_sync();
        for (int i = ark_tid(); i < rows * S::D; i += ARK_THREADS) {
          const int r = i / S::D, d = i % S::D;
          for (int e = 0; e < many; ++e) {
            s.sum[0][i] += s.slope[r * C + e] * other(0, at + e, d);
            if (KEYS) s.sum[1][i] += s.weight[r * C + e] * other(1, at + e, d);
          }
        }
        ark_sync();
      }
    }
    for (int i = ark_tid(); i < rows * S::D; i += ARK_THREADS) {
      const int to = row + i / S::D, d = column + i % S::D;
      ark_publish(c, first, 0, batch, to, d, s.sum[0][i]);
      if constexpr (KEYS) ark_publish(c, second, 0, batch, to, d, s.sum[1][i]);
    }
    ark_sync();
  }
}
