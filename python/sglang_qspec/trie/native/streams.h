// The drafts of one request, found by their key, and the keys of those that were dropped.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "arena.h"
#include "trust.h"

namespace qspec {

// What a stream counts for besides its tokens: its context token, its record and what short chains
// leave free in the arena take as much memory as that many tokens.
constexpr int kStreamTokens = 4;

// What names a stream: a draft of the same number from a later base is a stream of its own.
struct Key {
  std::int64_t stream_id;
  std::int32_t base_len;
  Source source;

  bool operator==(const Key& other) const { return tie() == other.tie(); }
  bool operator<(const Key& other) const { return tie() < other.tie(); }

  // SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
  std::uint64_t hash() const {
    std::uint64_t bits = static_cast<std::uint64_t>(stream_id) * 0x9E3779B97F4A7C15u +
                         static_cast<std::uint32_t>(base_len) * kSources + source;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
  }

 private:
  std::tuple<Source, std::int64_t, std::int32_t> tie() const {
    return {source, stream_id, base_len};
  }
};

// A chain of nodes: the token before the draft, then the draft's tokens.
struct Stream {
  Key key;
  NodeId first, last;  // `first` is the token before the draft's first one
  int length;
  NodeId at;    // up to which the stream is what was committed
  int matched;  // tokens of the stream that were committed in its place, so far
  Kind kind;
  bool followed;  // it continues all that is committed, or lags behind it
};

// Streams have the numbers 1, 2, ... in the order in which they were added.
class Streams {
 public:
  std::int32_t size() const { return static_cast<std::int32_t>(streams_.size()); }
  std::size_t bytes() const {
    return streams_.capacity() * sizeof(Stream) + slots_.capacity() * sizeof(std::int32_t);
  }

  Stream& operator[](std::int32_t number) { return streams_[place(number)]; }
  const Stream& operator[](std::int32_t number) const { return streams_[place(number)]; }

  // The number of the stream with this key, or 0.
  std::int32_t find(const Key& key) const { return slots_.empty() ? 0 : slots_[slot_of(key)]; }

  // Add a stream with a new key; its number.
  std::int32_t add(const Stream& stream) {
    if (4 * (streams_.size() + 1) > 3 * slots_.size()) grow();
    make_room(streams_, 1);
    streams_.push_back(stream);
    return slots_[slot_of(stream.key)] = size();
  }

  void check_integrity() const {
    for (std::int32_t number = 1; number <= size(); ++number) {
      if (find((*this)[number].key) != number) {
        throw std::runtime_error("a stream cannot be found by its key");
      }
    }
  }

 private:
  static std::size_t place(std::int32_t number) { return static_cast<std::size_t>(number) - 1; }

  // Where `key` is, or the free slot where it would be: linear probing, as the table never fills.
  std::size_t slot_of(const Key& key) const {
    const std::size_t last = slots_.size() - 1;
    std::size_t at = key.hash() & last;
    while (slots_[at] && !((*this)[slots_[at]].key == key)) at = (at + 1) & last;
    return at;
  }

  void grow() {
    slots_.assign(slots_.empty() ? 8 : 2 * slots_.size(), 0);
    for (std::int32_t number = 1; number <= size(); ++number) {
      slots_[slot_of((*this)[number].key)] = number;
    }
  }

  std::vector<Stream> streams_;      // number n is at n - 1
  std::vector<std::int32_t> slots_;  // numbers, or 0; a power of two of them
};

// Keys of streams that were dropped, so that a late piece of one does not begin it anew.
class Dropped {
 public:
  std::size_t bytes() const { return keys_.capacity() * sizeof(Key); }

  bool holds(const Key& key) const { return std::binary_search(keys_.begin(), keys_.end(), key); }

  // Remember `fresh` too, and at most `most` keys in all. It costs O(all of them).
  void add(std::vector<Key> fresh, std::size_t most) {
    std::sort(fresh.begin(), fresh.end());
    std::vector<Key> all;
    all.reserve(keys_.size() + fresh.size());
    std::merge(keys_.begin(), keys_.end(), fresh.begin(), fresh.end(), std::back_inserter(all));
    const auto surplus = static_cast<std::ptrdiff_t>(all.size() - std::min(all.size(), most));
    keys_.assign(all.begin() + surplus, all.end());
    keys_.shrink_to_fit();
  }

 private:
  std::vector<Key> keys_;  // sorted
};

}  // namespace qspec
