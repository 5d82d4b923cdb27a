// The tile registers of AMX: eight squares of 16 rows with 64 bytes. A processor with AMX has AVX-512.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#ifdef __AVX512F__
#define QSPEC_TILES
#endif

namespace qspec {

constexpr int TILE_ROWS = 16;
constexpr int TILE_ROW_BYTES = 64;
constexpr int TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;

#ifdef QSPEC_TILES

// Whether the processor has AMX for bfloat16 and for bytes, and the kernel lets this process use it.
// Threads and processes that start later may use it too.
inline bool may_use_tiles() {
  static const bool may = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned BFLOAT16 = 1U << 22U, TILES = 1U << 24U, BYTES = 1U << 25U;
    constexpr unsigned NEEDED = BFLOAT16 | TILES | BYTES;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & NEEDED) != NEEDED) return false;
    constexpr int ASK_FOR_PERMISSION = 0x1023, TILE_DATA = 18;  // asm/prctl.h
    return syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, TILE_DATA) == 0;
  }();
  return may;
}

// The layout of the tile registers of a thread. oneDNN sets layouts of its own in the same threads, so
// the end of this object's life restores the layout from before.
class TileLayout {
 public:
  __attribute__((target("amx-tile"))) TileLayout() {
    _tile_storeconfig(before_);
    _tile_loadconfig(ALL_WHOLE);
  }
  __attribute__((target("amx-tile"))) ~TileLayout() { _tile_loadconfig(before_); }
  TileLayout(const TileLayout&) = delete;
  TileLayout& operator=(const TileLayout&) = delete;

 private:
  // Palette 1; eight registers with 64 bytes in each of 16 rows. GCC drops writes to a local array,
  // because it does not know that the instruction reads all of it.
  alignas(64) static constexpr std::uint8_t ALL_WHOLE[64] = {
      1,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  //
      64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  //
      0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  //
      16, 16, 16, 16, 16, 16, 16, 16};
  alignas(64) std::uint8_t before_[64];
};

#else

inline bool may_use_tiles() { return false; }

#endif

}  // namespace qspec
