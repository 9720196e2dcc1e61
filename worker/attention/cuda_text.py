"""CUDA part of the attention kernels: text for the templates' placeholders, and products of tiles for matrix units of
16 by 8 numbers (compute capability 8).

A `Word` is one operand of a lane: two numbers of 16 bits, or one number of 32 bits. A product of tiles takes eight
words of a row, in any order that is the same for both factors, so each lane loads words that are adjacent in memory.
Numbers of 32 bits are multiplied as sums of two tf32 numbers, which keeps 21 bits of the mantissa.
"""

from typing import Final

WORDS: Final = {
    "query_rows": "16",
    "shared": "alignas(16) __shared__",
    "device_pointer": "",
    "lane": "int(threadIdx.x) % 32",
    "warp": "(int(threadIdx.x) / 32)",
    "block": "blockIdx",
    "blocks": "gridDim",
    "all_loads_begin": "__syncwarp()",
    "barrier": "__syncthreads()",
    "unroll": '_Pragma("unroll")',
    "unroll_few": '_Pragma("unroll 4")',
    "maximum": "fmaxf",
    "exp2": "exp2f",
    "shuffle": "SHUFFLED",
}

HEADER: Final = r"""
#define SHUFFLED(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define NEIGHBOUR 1
#define OTHER_NEIGHBOUR 2
#define ROW(lane) ((lane) / 4)
#define COLUMN(lane) ((lane) % 4 * 2)
#define STEPS(T, D) ((D) * int(sizeof(T)) / 32)
#define UNROLL _Pragma("unroll")

typedef unsigned int Word;

// Adds A[16, 8 words] x B[8 words, 8] to C[16, 8].
__device__ inline void tile_product(float& c0, float& c1, float& c2, float& c3, const Word (&a)[4], Word b0, Word b1,
                                    __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void tile_product(float& c0, float& c1, float& c2, float& c3, const Word (&a)[4], Word b0, Word b1,
                                    __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void short_product(float& c0, float& c1, float& c2, float& c3, const Word (&a)[4], Word b0, Word b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline Word high(Word word) { return word & 0xffffe000u; }

__device__ inline Word low(Word word) {
  return __float_as_uint(__uint_as_float(word) - __uint_as_float(high(word)));
}

__device__ inline void tile_product(float& c0, float& c1, float& c2, float& c3, const Word (&a)[4], Word b0, Word b1,
                                    float) {
  const Word above[4] = {high(a[0]), high(a[1]), high(a[2]), high(a[3])};
  const Word below[4] = {low(a[0]), low(a[1]), low(a[2]), low(a[3])};
  short_product(c0, c1, c2, c3, below, high(b0), high(b1));
  short_product(c0, c1, c2, c3, above, low(b0), low(b1));
  short_product(c0, c1, c2, c3, above, high(b0), high(b1));
}

__device__ inline Word pair(float one, float other, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(one, other);
  return *reinterpret_cast<Word*>(&both);
}

__device__ inline Word pair(float one, float other, __half) {
  __half2 both = __floats2half2_rn(one, other);
  return *reinterpret_cast<Word*>(&both);
}

__device__ inline Word pair(float one, float, float) { return __float_as_uint(one); }

// Loads COUNT adjacent words, aligned to their size, at most to 16 bytes.
template <int COUNT>
__device__ inline void load_words(Word* to, const void* from) {
  if constexpr (COUNT % 4 == 0) {
    UNROLL
    for (int i = 0; i < COUNT / 4; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = four.x;
      to[4 * i + 1] = four.y;
      to[4 * i + 2] = four.z;
      to[4 * i + 3] = four.w;
    }
  } else if constexpr (COUNT % 2 == 0) {
    UNROLL
    for (int i = 0; i < COUNT / 2; ++i) {
      const uint2 two = reinterpret_cast<const uint2*>(from)[i];
      to[2 * i] = two.x;
      to[2 * i + 1] = two.y;
    }
  } else {
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
      to[i] = reinterpret_cast<const Word*>(from)[i];
    }
  }
}

// COUNT numbers of a slot as in memory: words, or codes of BITS bits with a scale and a bias per group of 64, which are
// dequantized when they are used.
template <typename T, int D, int BITS, int COUNT>
struct Numbers {
  static constexpr int PER_WORD = 4 / int(sizeof(T));
  static constexpr int CODED = COUNT * BITS < 32 ? 1 : COUNT * BITS / 32;
  Word held[BITS == 0 ? COUNT / PER_WORD : CODED];
  T scale, bias;

  // Loads from a slot; `place` is the first slot of its row and head.
  __device__ inline void load(const void* from, const T* scales, const T* biases, long place, int slot, int at) {
    if constexpr (BITS == 0) {
      load_words<COUNT / PER_WORD>(held, reinterpret_cast<const T*>(from) + place * D + (slot * D + at));
    } else {
      constexpr int WIDTH = D * BITS / 32;
      load_words<CODED>(held, reinterpret_cast<const Word*>(from) + place * WIDTH + (slot * WIDTH + at * BITS / 32));
      if constexpr (COUNT * BITS < 32) {
        held[0] >>= at * BITS % 32;
      }
      const int group = slot * (D / 64) + at / 64;
      scale = (scales + place * (D / 64))[group];
      bias = (biases + place * (D / 64))[group];
    }
  }

  __device__ inline Word word(int at) const {
    if constexpr (BITS == 0) {
      return held[at];
    } else {
      return pair(number(at * PER_WORD), number((at + 1) * PER_WORD - 1), T());
    }
  }

  __device__ inline float number(int at) const {
    // The last bits of the float 2^23 + code are the code.
    const Word code = held[at * BITS / 32] >> (at * BITS % 32) & ((1u << BITS) - 1);
    return fmaf(__uint_as_float(code | 0x4b000000u) - 8388608.0f, float(scale), float(bias));
  }
};

// Partition of a row into runs: in each, a lane has WORDS adjacent words, two per step of the product.
template <typename T, int D>
struct Runs {
  static constexpr int STEPS_OF_ROW = STEPS(T, D);
  static constexpr int WORDS = STEPS_OF_ROW % 2 == 0 ? 4 : 2;
  static constexpr int COUNT = STEPS_OF_ROW * 2 / WORDS;
  static constexpr int NUMBERS = WORDS * 4 / int(sizeof(T));
};

// Stores the four words of each lane for one step of the product.
template <typename T, int D, typename P>
__device__ inline void stage_queries(float* own, P q, int begin, int queries, int step, int lane) {
  using R = Runs<T, D>;
  constexpr int STEPS_OF_RUN = R::WORDS / 2;
  const int word = step / STEPS_OF_RUN * 4 * R::WORDS + lane % 4 * R::WORDS + step % STEPS_OF_RUN * 2;
  const int at = word * 4 / int(sizeof(T));
  Word words[4] = {};
  UNROLL
  for (int h = 0; h < 2; ++h) {
    const int query = begin + h * 8 + lane / 4;
    if (query < queries) {
      Word two[2];
      load_words<2>(two, q + long(query) * D + at);
      words[h] = two[0];
      words[2 + h] = two[1];
    }
  }
  reinterpret_cast<uint4*>(own)[step * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T, int D, int BITS>
struct Keys {
  using R = Runs<T, D>;
  Numbers<T, D, BITS, R::NUMBERS> numbers[2][R::COUNT];

  template <typename P>
  __device__ inline void load(P k, const T* scales, const T* biases, long place, int slot, int end, int lane) {
    UNROLL
    for (int f = 0; f < 2; ++f) {
      // Slots after the last repeat it, and the mask hides them: loads without a branch all begin at once.
      const int own = min(slot + f * 8 + lane / 4, end - 1);
      UNROLL
      for (int run = 0; run < R::COUNT; ++run) {
        numbers[f][run].load(k, scales, biases, place, own, (run * 4 + lane % 4) * R::NUMBERS);
      }
    }
  }

  __device__ inline void multiply(float (&scores)[2][2][2], const float* own, int lane) {
    UNROLL
    for (int step = 0; step < R::STEPS_OF_ROW; ++step) {
      const uint4 four = reinterpret_cast<const uint4*>(own)[step * 32 + lane];
      const Word a[4] = {four.x, four.y, four.z, four.w};
      UNROLL
      for (int f = 0; f < 2; ++f) {
        const auto& own_run = numbers[f][step * 2 / R::WORDS];
        tile_product(scores[0][f][0], scores[0][f][1], scores[1][f][0], scores[1][f][1], a,
                     own_run.word(step * 2 % R::WORDS), own_run.word(step * 2 % R::WORDS + 1), T());
      }
    }
  }
};

template <typename T, int D, int BITS>
struct Values {
  static constexpr int PER_WORD = 4 / int(sizeof(T));
  static constexpr int W = RUN(D);
  static constexpr int COUNT = D / 8 / W;
  // Numbers of slots 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where t is the lane's index among four.
  Numbers<T, D, BITS, W> numbers[4][COUNT];

  template <typename P>
  __device__ inline void load(P v, const T* scales, const T* biases, long place, int slot, int end, int lane) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int own = min(slot + i / 2 * 8 + lane % 4 * 2 + i % 2, end - 1);
      UNROLL
      for (int run = 0; run < COUNT; ++run) {
        numbers[i][run].load(v, scales, biases, place, own, (run * 8 + lane / 4) * W);
      }
    }
  }

  __device__ inline void multiply(float (&out)[2][D / 8][2], const float (&weights)[2][2][2], int lane) {
    if constexpr (PER_WORD == 2) {
      Word a[4];
      UNROLL
      for (int i = 0; i < 4; ++i) {
        a[i] = pair(weights[i % 2][i / 2][0], weights[i % 2][i / 2][1], T());
      }
      UNROLL
      for (int f = 0; f < D / 8; ++f) {
        const int run = f / W, word = f % W / 2;
        const int order = f % 2 == 0 ? 0x5410 : 0x7632;
        add(out, f, a, __byte_perm(numbers[0][run].word(word), numbers[1][run].word(word), order),
            __byte_perm(numbers[2][run].word(word), numbers[3][run].word(word), order));
      }
    } else {
      UNROLL
      for (int part = 0; part < 2; ++part) {
        Word a[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
          a[i] = __float_as_uint(weights[i % 2][part][i / 2]);
        }
        UNROLL
        for (int f = 0; f < D / 8; ++f) {
          add(out, f, a, numbers[2 * part][f / W].word(f % W), numbers[2 * part + 1][f / W].word(f % W));
        }
      }
    }
  }

  __device__ static inline void add(float (&out)[2][D / 8][2], int f, const Word (&a)[4], Word b0, Word b1) {
    tile_product(out[0][f][0], out[0][f][1], out[1][f][0], out[1][f][1], a, b0, b1, T());
  }
};
"""
