// The end of an iteration that draws a token for each of several sequences.

// Has this sequence drawn a stop token, or come to its limit?
template <int CONTEXT, int STOPS, class S, class P, class T, class E>
ARK_DEVICE bool ark_ended(S settings, P position, T tokens, E stop_tokens) {
  const int at = position.p[0];
  if (at <= settings.p[3]) return false;
  if (at + 1 >= settings.p[4] || at + 1 >= CONTEXT) return true;
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  const ark_i32 token = tokens.p[at];
  bool found = false;
  for (int k = 0; k < stops; ++k) found = found || stop_tokens.p[k] == token;
  return found;
}

// One sequence after another: nothing where it has ended, one position on within its prompt, else
// as ark_choose. The run ends with the last of them.
template <int VOCABULARY, int TILES, int CONTEXT, int STOPS, int BATCH, int SETTINGS, class L,
          class S, class P, class C, class T, class H, class E>
ARK_DEVICE void ark_choose_each(ArkCtx& c, const ArkTask& t, L logits, S settings, P position,
                                C candidates, T tokens, H host, E stop_tokens) {
  ark_u32* limit = &ark_control(ARK_PARAMS(c))->limit;
  const ark_u32 before = ark_peek_host(limit);  // as others read it, it is not stored plainly
  bool over = true;
  for (int b = 0; b < BATCH; ++b) {
    const bool ended = ark_ended<CONTEXT, STOPS>(settings, position, tokens, stop_tokens);
    const bool reads = position.p[0] < settings.p[3];
    ark_sync();  // all have read what one of them writes
    if (!ended && reads && ark_tid() == 0) position.p[0] += 1;
    if (!ended && !reads) {
      ark_choose<VOCABULARY, 0, TILES, CONTEXT, STOPS>(c, t, logits, settings, position, candidates,
                                                       tokens, host, stop_tokens);
    }
    if (ark_tid() == 0) {
      over = ark_ended<CONTEXT, STOPS>(settings, position, tokens, stop_tokens) && over;
    }
    logits.p += VOCABULARY;
    settings.p += SETTINGS;
    position.p += 1;
    candidates.p += 2 * TILES;
    tokens.p += CONTEXT;
    host.p += CONTEXT;
  }
  if (ark_tid() == 0 && !over) ark_post_host(limit, before);
}
