"""Text of the attention kernels, which CUDA and Metal share: split-KV attention of rows with lengths of their own.

First pass: a block has one row, one KV head, one split of `SPLIT` slots, and a tile of queries. A query is a head of
the KV head's group at one of the row's new tokens. Each of the block's `CHAINS` warps takes every fourth 16 slots of
the split, with a softmax of its own that is corrected as it goes; then the warps' sums are added in order.
Second pass: the splits' sums are added, again by chains in a fixed order, with the sink. Where a sum is cut depends on
slots alone: not on the other rows, their number, the length of the longest, or how many tokens are new.

What differs between the two languages is a table of words, and a header with the products of small tiles, which go
through the matrix units of each: of 16 by 8 numbers in CUDA, 8 by 8 in Metal. A lane holds in both the same part of
their results: `HELD` rows, and of each 8 columns two neighbours. Dimensions are in an order that suits loads: column n
of fragment f is dimension `f / W * 8 * W + n * W + f % W`, so what a lane needs of a row lies in runs of `W` numbers.
"""

from collections.abc import Mapping
from string import Template
from typing import Final

# Slots of a split: a warp's work is a quarter of them, in tiles of 16.
SPLIT: Final = 512
CHAINS: Final = 4
TILE: Final = 16
# Warps of the second pass, each of which adds every eighth split.
SUMMERS: Final = 8

SPLIT_INPUTS: Final = ("q", "k", "v", "k_scales", "k_biases", "v_scales", "v_biases", "lengths", "numbers")
SPLIT_OUTPUTS: Final = ("sums", "stats")
SUM_INPUTS: Final = ("sums", "stats", "q", "sinks", "lengths", "numbers")
SUM_OUTPUTS: Final = ("out",)

_COMMON: Final = """
#define RUN(D) ((D) % 64 == 0 ? 8 : (D) % 32 == 0 ? 4 : 2)
"""

SPLIT_BODY: Final = Template("""
  constexpr int QT = $query_rows;
  constexpr int HELD = QT / 8;
  constexpr int FRAGMENTS = D / 8;
  constexpr int W = RUN(D);
  // Fragments of a sum that all chains put into shared memory at once.
  constexpr int ROUND = 16;
  constexpr float NONE = -1e30f;
  $shared float kept[$chains * HELD * ROUND * 64];
  $shared float chain_max[$chains * QT];
  $shared float chain_sum[$chains * QT];

  const int lane = $lane;
  const int chain = $warp;
  const int row = $block.z;
  const int head = $block.y;
  const int kv_heads = k_shape[1];
  const int tokens = q_shape[2];
  const int room = k_shape[2];
  const int queries = q_shape[1] / kv_heads * tokens;
  // Tiles of the same split are neighbours: what one has loaded is near when the others ask for it.
  const int tiles = (queries + QT - 1) / QT;
  const int split = int($block.x) / tiles;
  const int splits = int($blocks.x) / tiles;
  const int begin = int($block.x) % tiles * QT;
  const int split_begin = split * $split;
  // Token i of the row sees slots up to `length + i`, of a window the newest. [first, end) are seen by at least one.
  const int length = lengths[row];
  const int window = int(numbers[1]);
  const int end = min(length + tokens, room);
  const int first = window > 0 ? max(0, length + 1 - window) : 0;
  if (split_begin >= end || split_begin + $split <= first) {
    return;
  }
  const long place = long(row) * kv_heads + head;
  for (int step = chain; step < STEPS(T, D); step += $chains) {
    stage_queries<T, D>(kept, q + place * queries * D, begin, queries, step, lane);
  }
  $barrier;

  float out[HELD][FRAGMENTS][2];
  float highest[HELD];
  float sum[HELD];
  int last[HELD];
  $unroll
  for (int h = 0; h < HELD; ++h) {
    last[h] = length + (begin + h * 8 + ROW(lane)) % tokens;
    highest[h] = NONE;
    sum[h] = 0;
    $unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      out[h][f][0] = 0;
      out[h][f][1] = 0;
    }
  }
  const float scale = numbers[0];
  const int split_end = min(split_begin + $split, end);
  for (int slot = split_begin + chain * $tile; slot < split_end; slot += $chains * $tile) {
    if (slot + $tile <= first) {
      continue;
    }
    Keys<T, D, BITS> keys;
    Values<T, D, BITS> values;
    keys.load(k, k_scales, k_biases, place * room, slot, end, lane);
    values.load(v, v_scales, v_biases, place * room, slot, end, lane);
    // Else compilers put off loads until their numbers are needed, one wait after the other.
    $all_loads_begin;
    float scores[HELD][2][2] = {};
    keys.multiply(scores, kept, lane);
    $unroll
    for (int h = 0; h < HELD; ++h) {
      float most = highest[h];
      $unroll
      for (int f = 0; f < 2; ++f) {
        $unroll
        for (int c = 0; c < 2; ++c) {
          const int other = slot + f * 8 + COLUMN(lane) + c;
          const bool is_seen = other <= last[h] && (window <= 0 || other > last[h] - window) && other < end;
          scores[h][f][c] = is_seen ? scores[h][f][c] * scale : 2 * NONE;
          most = $maximum(most, scores[h][f][c]);
        }
      }
      most = $maximum(most, $shuffle(most, NEIGHBOUR));
      most = $maximum(most, $shuffle(most, OTHER_NEIGHBOUR));
      const float factor = $exp2(highest[h] - most);
      highest[h] = most;
      sum[h] *= factor;
      $unroll
      for (int f = 0; f < 2; ++f) {
        $unroll
        for (int c = 0; c < 2; ++c) {
          scores[h][f][c] = $exp2(scores[h][f][c] - most);
          sum[h] += scores[h][f][c];
        }
      }
      $unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        out[h][f][0] *= factor;
        out[h][f][1] *= factor;
      }
    }
    values.multiply(out, scores, lane);
  }

  $unroll
  for (int h = 0; h < HELD; ++h) {
    sum[h] += $shuffle(sum[h], NEIGHBOUR);
    sum[h] += $shuffle(sum[h], OTHER_NEIGHBOUR);
    if (COLUMN(lane) == 0) {
      chain_max[chain * QT + h * 8 + ROW(lane)] = highest[h];
      chain_sum[chain * QT + h * 8 + ROW(lane)] = sum[h];
    }
  }
  $barrier;
  $unroll
  for (int h = 0; h < HELD; ++h) {
    const int at = h * 8 + ROW(lane);
    float most = NONE;
    float total = 0;
    for (int c = 0; c < $chains; ++c) {
      most = $maximum(most, chain_max[c * QT + at]);
    }
    for (int c = 0; c < $chains; ++c) {
      total += chain_sum[c * QT + at] * $exp2(chain_max[c * QT + at] - most);
    }
    const int query = begin + at;
    if (chain == 0 && COLUMN(lane) == 0 && query < queries) {
      const long to = ((place * splits + split) * queries + query) * 2;
      stats[to] = most;
      stats[to + 1] = total;
    }
    const float factor = $exp2(highest[h] - most);
    $unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      out[h][f][0] *= factor;
      out[h][f][1] *= factor;
    }
  }

  $unroll
  for (int base = 0; base < FRAGMENTS; base += ROUND) {
    $unroll
    for (int h = 0; h < HELD; ++h) {
      $unroll
      for (int f = base; f < min(base + ROUND, FRAGMENTS); ++f) {
        const int at = ((chain * HELD + h) * ROUND + f - base) * 64 + lane;
        kept[at] = out[h][f][0];
        kept[at + 32] = out[h][f][1];
      }
    }
    $barrier;
    // Each warp adds every fourth run of the chains' sums, and writes it.
    const int runs = min(ROUND, FRAGMENTS - base) / W;
    for (int part = chain; part < HELD * runs * 2; part += $chains) {
      const int h = part / (runs * 2);
      const int run = part / 2 % runs;
      const int e = part % 2;
      const int query = begin + h * 8 + ROW(lane);
      if (query < queries) {
        const long at = (place * splits + split) * queries + query;
        $device_pointer float* to = sums + at * D + (base + run * W) * 8 + (COLUMN(lane) + e) * W;
        $unroll
        for (int i = 0; i < W; ++i) {
          float whole = 0;
          $unroll
          for (int c = 0; c < $chains; ++c) {
            whole += kept[((c * HELD + h) * ROUND + run * W + i) * 64 + e * 32 + lane];
          }
          to[i] = whole;
        }
      }
    }
    $barrier;
  }
""")

SUM_BODY: Final = Template("""
  constexpr int HELD = (D + 31) / 32;
  constexpr float NONE = -1e30f;
  $shared float chain_out[$summers * D];
  $shared float chain_max[$summers];
  $shared float chain_sum[$summers];

  const int lane = $lane;
  const int chain = $warp;
  const int token = $block.x;
  const int q_head = $block.y;
  const int row = $block.z;
  const int heads = q_shape[1];
  const int tokens = q_shape[2];
  const int kv_heads = stats_shape[1];
  const int splits = stats_shape[2];
  const int group = heads / kv_heads;
  const int queries = group * tokens;
  const int last = lengths[row] + token;
  const int window = int(numbers[1]);
  const int first_split = window > 0 ? max(0, last + 1 - window) / $split : 0;
  const int end_split = min(last / $split + 1, splits);
  const int begin_split = first_split / $summers * $summers + chain;
  const long place = (long(row) * kv_heads + q_head / group) * splits * queries + q_head % group * tokens + token;

  float most = NONE;
  for (int split = begin_split; split < end_split; split += $summers) {
    if (split >= first_split) {
      most = $maximum(most, stats[(place + long(split) * queries) * 2]);
    }
  }
  float sum = 0;
  float part[HELD] = {};
  $unroll_few
  for (int split = begin_split; split < end_split; split += $summers) {
    if (split >= first_split) {
      const long at = place + long(split) * queries;
      const float factor = $exp2(stats[at * 2] - most);
      sum += stats[at * 2 + 1] * factor;
      $unroll
      for (int h = 0; h < HELD; ++h) {
        if (h * 32 + lane < D) {
          part[h] += sums[at * D + h * 32 + lane] * factor;
        }
      }
    }
  }
  $unroll
  for (int h = 0; h < HELD; ++h) {
    if (h * 32 + lane < D) {
      chain_out[chain * D + h * 32 + lane] = part[h];
    }
  }
  if (lane == 0) {
    chain_max[chain] = most;
    chain_sum[chain] = sum;
  }
  $barrier;
  const float sink = HAS_SINKS ? float(sinks[q_head]) * 1.44269504f : NONE;
  float highest = sink;
  for (int c = 0; c < $summers; ++c) {
    highest = $maximum(highest, chain_max[c]);
  }
  float total = HAS_SINKS ? $exp2(sink - highest) : 0.0f;
  for (int c = 0; c < $summers; ++c) {
    total += chain_sum[c] * $exp2(chain_max[c] - highest);
  }
  for (int at = chain * 32 + lane; at < D; at += 32 * $summers) {
    float whole = 0;
    for (int c = 0; c < $summers; ++c) {
      whole += chain_out[c * D + at] * $exp2(chain_max[c] - highest);
    }
    out[((long(row) * heads + q_head) * tokens + token) * D + at] = T(whole / total);
  }
""")


def header(language: str) -> str:
    """What stands before a kernel in a language, whose own part is given."""
    return _COMMON + language


def written(body: Template, words: Mapping[str, str]) -> str:
    """The text of a kernel in a language. Raises `KeyError` for a word that it lacks."""
    sizes = {"split": SPLIT, "chains": CHAINS, "tile": TILE, "summers": SUMMERS}
    return body.substitute(words, **{name: str(size) for name, size in sizes.items()})
