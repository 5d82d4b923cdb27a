// Vectors of floats for the products and the decoder: 16 floats with AVX-512, 8 with AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace qspec {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

// A vector fills one register; the compiler has its operators, also with a number as one operand.
template <typename Item>
using Vector [[gnu::vector_size(LANES * sizeof(Item))]] = Item;
using Floats = Vector<float>;
using Ints = Vector<std::int32_t>;

// Values of a row whose sums a loop keeps in registers, as VECTORS vectors, for up to AT_ONCE rows.
constexpr int VECTORS = 4;
constexpr int BLOCK = VECTORS * LANES;
constexpr int AT_ONCE = LANES / 4;

constexpr int HEAD_STEP = 64;  // the dimension of a head is a multiple of this
static_assert(HEAD_STEP % BLOCK == 0);

// Call `work` with `count`, from 1 to MOST, as a constant of the compiler.
template <int MOST, typename Work>
void with_constant(int count, Work work) {
  if constexpr (MOST > 1) {
    if (count < MOST) return with_constant<MOST - 1>(count, work);
  }
  work(std::integral_constant<int, MOST>{});
}

// The bits of a bfloat16 number.
struct BFloat16 {
  std::uint16_t bits;
};

inline Floats broadcast(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const BFloat16* from) {
  Vector<std::uint16_t> bits;
  std::memcpy(&bits, from, sizeof bits);
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Ints) << 16);
}

// The first `count` floats, and `other` in the remaining lanes.
inline Floats load_part(const float* from, int count, Floats other) {
  if (count >= LANES) return load(from);
  std::memcpy(&other, from, static_cast<std::size_t>(count) * sizeof(float));
  return other;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// Round to nearest, ties to even. NaN is not supported.
inline void store(BFloat16* to, Floats values) {
  using Bits = Vector<std::uint32_t>;
  const Bits bits = reinterpret_cast<Bits>(values);
  const Bits rounded = (bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16;
  const auto upper = __builtin_convertvector(rounded, Vector<std::uint16_t>);
  std::memcpy(to, &upper, sizeof upper);
}

// Store the first `count` floats.
inline void store_part(float* to, Floats values, int count) {
  if (count >= LANES) return store(to, values);
  std::memcpy(to, &values, static_cast<std::size_t>(count) * sizeof(float));
}

inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

#ifdef __AVX512F__

// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// Round to nearest, ties to even.
inline Ints to_ints(Floats values) { return reinterpret_cast<Ints>(_mm512_cvtps_epi32(values)); }

inline float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }
inline float smallest(Floats values) { return _mm512_reduce_min_ps(values); }
inline float largest(Floats values) { return _mm512_reduce_max_ps(values); }

// Transpose a square of 16 x 16 floats.
inline void transpose(Floats (&row)[LANES]) {
  Floats pair[LANES];
  for (int i = 0; i < LANES; i += 2) {
    pair[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  // row[4g + c] now has the columns c, c + 4, c + 8 and c + 12 of the rows 4g to 4g + 3.
  for (int g = 0; g < LANES; g += 4) {
    row[g] = low(pair[g], pair[g + 2]);
    row[g + 1] = high(pair[g], pair[g + 2]);
    row[g + 2] = low(pair[g + 1], pair[g + 3]);
    row[g + 3] = high(pair[g + 1], pair[g + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const Floats a = _mm512_shuffle_f32x4(row[c], row[4 + c], 0x88);
    const Floats b = _mm512_shuffle_f32x4(row[8 + c], row[12 + c], 0x88);
    const Floats d = _mm512_shuffle_f32x4(row[c], row[4 + c], 0xDD);
    const Floats e = _mm512_shuffle_f32x4(row[8 + c], row[12 + c], 0xDD);
    pair[c] = _mm512_shuffle_f32x4(a, b, 0x88);
    pair[8 + c] = _mm512_shuffle_f32x4(a, b, 0xDD);
    pair[4 + c] = _mm512_shuffle_f32x4(d, e, 0x88);
    pair[12 + c] = _mm512_shuffle_f32x4(d, e, 0xDD);
  }
  for (int i = 0; i < LANES; ++i) row[i] = pair[i];
}

#else

// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// Round to nearest, ties to even.
inline Ints to_ints(Floats values) { return reinterpret_cast<Ints>(_mm256_cvtps_epi32(values)); }

// Combine all lanes with a function of two vectors.
template <typename Combine>
float reduce(Floats values, Combine combine) {
  values = combine(values, _mm256_permute2f128_ps(values, values, 1));
  values = combine(values, _mm256_permute_ps(values, 0b01'00'11'10));
  values = combine(values, _mm256_permute_ps(values, 0b10'11'00'01));
  return values[0];
}

inline float sum_of(Floats values) {
  return reduce(values, [](Floats a, Floats b) { return a + b; });
}
inline float smallest(Floats values) { return reduce(values, smaller); }
inline float largest(Floats values) { return reduce(values, larger); }

// Transpose a square of 8 x 8 floats.
inline void transpose(Floats (&row)[LANES]) {
  Floats pair[LANES];
  for (int i = 0; i < LANES; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  // four[4g + c] has the columns c and c + 4 of the rows 4g to 4g + 3.
  Floats four[LANES];
  for (int g = 0; g < LANES; g += 4) {
    four[g] = _mm256_shuffle_ps(pair[g], pair[g + 2], 0x44);
    four[g + 1] = _mm256_shuffle_ps(pair[g], pair[g + 2], 0xEE);
    four[g + 2] = _mm256_shuffle_ps(pair[g + 1], pair[g + 3], 0x44);
    four[g + 3] = _mm256_shuffle_ps(pair[g + 1], pair[g + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    row[c] = _mm256_permute2f128_ps(four[c], four[4 + c], 0x20);
    row[4 + c] = _mm256_permute2f128_ps(four[c], four[4 + c], 0x31);
  }
}

#endif

// e to the power of x, with an error of about 2 units in the last place.
inline Floats exponential(Floats x) {
  x = smaller(larger(x, broadcast(-87.0F)), broadcast(88.0F));
  const Ints power = to_ints(x * 1.442695041F);
  const Floats n = to_floats(power);
  Floats r = fma(n, broadcast(-0.693359375F), x);
  r = fma(n, broadcast(2.12194440e-4F), r);
  Floats p = broadcast(1.0F / 720);
  for (const float c : {1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F}) p = fma(p, r, broadcast(c));
  return p * reinterpret_cast<Floats>((power + 127) << 23);
}

// The SiLU of `gate` times `up`.
inline Floats gated(Floats gate, Floats up) { return gate / (1.0F + exponential(-gate)) * up; }

// Uninitialised memory, on huge pages where available.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size) { reserve(size); }

  // Ensure room for `size` items; growing discards the content.
  void reserve(std::size_t size) {
    if (size <= size_) return;
    const std::size_t bytes = (size * sizeof(T) + 63) / 64 * 64;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    size_ = data_ ? size : 0;
    if (!data_) throw std::bad_alloc();
  }

  T* get() { return data_.get(); }
  const T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

}  // namespace qspec
