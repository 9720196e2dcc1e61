"""Source of the attention kernels, shared by CUDA and Metal: split-KV attention of rows of unequal lengths.

First pass: a block computes one row, one KV head, one split of `SPLIT` slots, and one tile of queries. A query is a
head of the KV head's group at one of the row's new tokens. Each of the block's `CHAINS` warps takes every fourth tile
of slots of the split, with its own online softmax; then the sums of the warps are added in order. Second pass: the sums
of the splits are added, also by warps in a fixed order, with the sink. The boundaries of sums depend only on slots: not
on the other rows, their number, the longest length, or the number of new tokens. So a row has the same bits in any
batch.

CUDA and Metal differ in the text for the template's placeholders, and in a header with the products of small tiles,
which use the matrix units: 16 by 8 numbers in CUDA, 8 by 8 in Metal. In both, a lane holds the same part of the product
of two tiles: `HELD` rows, and two adjacent columns of every 8. Dimensions are ordered for loads: column n of fragment f
is dimension `f / W * 8 * W + n * W + f % W`, so a lane reads a row in runs of `W` numbers.
"""

from collections.abc import Mapping
from string import Template
from typing import Final

# A split has SPLIT slots, a block has CHAINS warps, and a tile has TILE slots.
SPLIT: Final = 512
CHAINS: Final = 4
TILE: Final = 16
# Number of warps in the second pass, each of which adds every eighth split.
SUMMERS: Final = 8

SPLIT_INPUTS: Final = ("q", "k", "v", "k_scales", "k_biases", "v_scales", "v_biases", "lengths", "numbers")
SPLIT_OUTPUTS: Final = ("sums", "stats")
SUM_INPUTS: Final = ("sums", "stats", "q", "sinks", "lengths", "numbers")
SUM_OUTPUTS: Final = ("out",)

COMMON: Final = """
#define RUN(D) ((D) % 64 == 0 ? 8 : (D) % 32 == 0 ? 4 : 2)
"""

SPLIT_BODY: Final = Template("""
  constexpr int QT = $query_rows;
  constexpr int HELD = QT / 8;
  constexpr int FRAGMENTS = D / 8;
  constexpr int W = RUN(D);
  // Fragments of a sum that fit into shared memory at once, for all chains.
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
  // Tiles of the same split are adjacent blocks, so that they share loads through the cache.
  const int tiles = (queries + QT - 1) / QT;
  const int split = int($block.x) / tiles;
  const int splits = int($blocks.x) / tiles;
  const int begin = int($block.x) % tiles * QT;
  const int split_begin = split * $split;
  // Token i of the row attends to slots up to `length + i`, or to the window's; some token attends to [first, end).
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
    // Without this, compilers delay each load until its numbers are needed, and the warp waits for each.
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
    // Each warp adds and writes every fourth run of the chains' sums.
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


def source(body: Template, words: Mapping[str, str]) -> str:
    """Return a kernel's source in one language, whose `words` replace the template's placeholders. Raises `KeyError`
    for a placeholder without a word.
    """
    sizes = {"split": SPLIT, "chains": CHAINS, "tile": TILE, "summers": SUMMERS}
    return body.substitute(words, **{name: str(size) for name, size in sizes.items()})
