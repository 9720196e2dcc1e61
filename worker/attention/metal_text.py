"""Metal part of the attention kernels: text for the templates' placeholders, and products of tiles for matrix units of
8 by 8 floats.
"""

from typing import Final

WORDS: Final = {
    "query_rows": "8",
    "shared": "threadgroup",
    "device_pointer": "device",
    "lane": "int(thread_index_in_simdgroup)",
    "warp": "int(simdgroup_index_in_threadgroup)",
    "block": "threadgroup_position_in_grid",
    "blocks": "threadgroups_per_grid",
    "all_loads_begin": "simdgroup_barrier(metal::mem_flags::mem_none)",
    "barrier": "threadgroup_barrier(metal::mem_flags::mem_threadgroup)",
    "unroll": '_Pragma("clang loop unroll(full)")',
    "unroll_few": '_Pragma("clang loop unroll_count(4)")',
    "maximum": "metal::max",
    "exp2": "metal::exp2",
    "shuffle": "metal::simd_shuffle_xor",
}

HEADER: Final = r"""
using namespace metal;

#define NEIGHBOUR 1
#define OTHER_NEIGHBOUR 8
#define ROW(lane) (((lane) / 4 & 4) + (lane) / 2 % 4)
#define COLUMN(lane) (((lane) / 4 & 2) * 2 + (lane) % 2 * 2)
#define STEPS(T, D) ((D) / 8)
#define UNROLL _Pragma("clang loop unroll(full)")

// Adds A[8, 8] x B[8, 8] to C[8, 8]. A lane holds two adjacent numbers of a row of each matrix.
inline void tile_product(thread float (&c)[2], float2 a, float2 b) {
  simdgroup_float8x8 left, right, sum;
  reinterpret_cast<thread float2&>(left.thread_elements()) = a;
  reinterpret_cast<thread float2&>(right.thread_elements()) = b;
  reinterpret_cast<thread float2&>(sum.thread_elements()) = float2(c[0], c[1]);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  const float2 result = reinterpret_cast<thread float2&>(sum.thread_elements());
  c[0] = result.x;
  c[1] = result.y;
}

// Loads COUNT numbers of a slot from number `at` on, and dequantizes codes of BITS bits, in groups of 64.
template <typename T, int D, int BITS, int COUNT, typename P, typename S>
inline void load_numbers(thread T* to, P from, S scales, S biases, long slot, int at) {
  if (BITS == 0) {
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
      to[i] = T(from[slot * D + at + i]);
    }
  } else {
    constexpr int WIDTH = BITS == 0 ? 8 : BITS;
    const float scale = float(scales[slot * (D / 64) + at / 64]);
    const float bias = float(biases[slot * (D / 64) + at / 64]);
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
      const long bit = (slot * D + at + i) * WIDTH;
      const uint code = uint(from[bit / 32]) >> uint(bit % 32) & ((1u << WIDTH) - 1u);
      to[i] = T(float(code) * scale + bias);
    }
  }
}

// Stores the two numbers of each lane for one step of the product.
template <typename T, int D, typename P>
inline void stage_queries(threadgroup float* own, P q, int begin, int queries, int step, int lane) {
  constexpr int W = RUN(D);
  const int query = begin + ROW(lane);
  UNROLL
  for (int c = 0; c < 2; ++c) {
    const int at = step / W * 8 * W + (COLUMN(lane) + c) * W + step % W;
    own[step * 64 + lane * 2 + c] = query < queries ? float(q[long(query) * D + at]) : 0.0f;
  }
}

template <typename T, int D, int BITS>
struct Keys {
  // Numbers of slots COLUMN and COLUMN + 1 of every 8.
  T numbers[2][2][D / 8];

  template <typename P, typename S>
  void load(P k, S scales, S biases, long place, int slot, int end, int lane) thread {
    constexpr int W = RUN(D);
    UNROLL
    for (int f = 0; f < 2; ++f) {
      UNROLL
      for (int c = 0; c < 2; ++c) {
        // Slots after the last repeat it; the mask hides them.
        const int own = min(slot + f * 8 + COLUMN(lane) + c, end - 1);
        UNROLL
        for (int run = 0; run < D / 8 / W; ++run) {
          const int at = (run * 8 + ROW(lane)) * W;
          load_numbers<T, D, BITS, W>(numbers[f][c] + run * W, k, scales, biases, place + own, at);
        }
      }
    }
  }

  void multiply(thread float (&scores)[1][2][2], const threadgroup float* own, int lane) thread {
    UNROLL
    for (int step = 0; step < D / 8; ++step) {
      const float2 a = float2(own[step * 64 + lane * 2], own[step * 64 + lane * 2 + 1]);
      UNROLL
      for (int f = 0; f < 2; ++f) {
        tile_product(scores[0][f], a, float2(float(numbers[f][0][step]), float(numbers[f][1][step])));
      }
    }
  }
};

template <typename T, int D, int BITS>
struct Values {
  // Two of every 8 runs of slot ROW of every 8.
  T numbers[2][D / 8 / RUN(D)][2 * RUN(D)];

  template <typename P, typename S>
  void load(P v, S scales, S biases, long place, int slot, int end, int lane) thread {
    constexpr int W = RUN(D);
    UNROLL
    for (int part = 0; part < 2; ++part) {
      const int own = min(slot + part * 8 + ROW(lane), end - 1);
      UNROLL
      for (int run = 0; run < D / 8 / W; ++run) {
        const int at = (run * 8 + COLUMN(lane)) * W;
        load_numbers<T, D, BITS, 2 * W>(numbers[part][run], v, scales, biases, place + own, at);
      }
    }
  }

  void multiply(thread float (&out)[1][D / 8][2], thread const float (&weights)[1][2][2], int lane) thread {
    constexpr int W = RUN(D);
    UNROLL
    for (int part = 0; part < 2; ++part) {
      const float2 a = float2(weights[0][part][0], weights[0][part][1]);
      UNROLL
      for (int f = 0; f < D / 8; ++f) {
        thread T* from = numbers[part][f / W];
        tile_product(out[0][f], a, float2(float(from[f % W]), float(from[W + f % W])));
      }
    }
  }
};
"""
