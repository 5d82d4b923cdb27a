// The draft streams of one request by their key, and the keys of dropped streams.

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

// Extra tokens that the caps count for each stream. Its context token, its record and the unused
// nodes of its last unit take about as much memory as this number of tokens.
constexpr int kStreamTokens = 4;

// Identifies a stream. The same `stream_id` with another `base_len` is another stream.
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

// A draft: a chain of nodes with the context token (the token before the draft) in front.
struct Stream {
  Key key;
  NodeId first, last;  // `first` is the context token
  int length;
  NodeId at;    // last node that agrees with the committed tokens
  int matched;  // number of draft tokens that agree with the committed tokens
  Kind kind;
  bool followed;  // no token differs from the committed ones so far

  // Whether the last `count` tokens are the first `count` of `token_ids`.
  bool ends_with(const Arena& arena, const std::vector<Token>& token_ids, std::size_t count) const {
    NodeId node = last;
    while (count-- > 0) {
      if (arena.token(node) != token_ids[count]) return false;
      node = arena.prev(node);
    }
    return true;
  }

  // Whether an output of `output_len` tokens is longer than the stream, which agrees with it.
  bool is_outrun(const Arena& arena, std::size_t output_len) const {
    const auto end = static_cast<std::size_t>(key.base_len + matched);
    return !arena.next(at) && end < output_len;
  }
};

// The streams of a request; they have the numbers 1, 2, ... in the order of their addition.
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

  // Add a stream with a new key. Returns its number.
  std::int32_t add(const Stream& stream) {
    if (4 * (streams_.size() + 1) > 3 * slots_.size()) grow();
    make_room(streams_, 1);
    streams_.push_back(stream);
    return slots_[slot_of(stream.key)] = size();
  }

  void check_integrity(const Arena& arena) const {
    for (std::int32_t number = 1; number <= size(); ++number) {
      if (find((*this)[number].key) != number) fail("a stream cannot be found by its key");
      check_chain(arena, number);
    }
  }

 private:
  [[noreturn]] static void fail(const char* what) { throw std::runtime_error(what); }

  void check_chain(const Arena& arena, std::int32_t number) const {
    const Stream& stream = (*this)[number];
    NodeId last = stream.first;
    int place = 0;
    for (NodeId node = last; node; node = arena.next(node), ++place) {
      if (arena.stream(node) != number) fail("a stream has a node of another one");
      if (place == stream.matched && node != stream.at) fail("a stream's match ends at a wrong node");
      last = node;
    }
    if (place != stream.length + 1) fail("a stream has a wrong length");
    if (last != stream.last) fail("a stream ends before its last node");
  }

  static std::size_t place(std::int32_t number) { return static_cast<std::size_t>(number) - 1; }

  // The slot of `key`, or the free slot for it. Linear probing ends because the table never fills.
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

  std::vector<Stream> streams_;      // stream number n is at index n - 1
  std::vector<std::int32_t> slots_;  // stream numbers, 0 for free; the size is a power of two
};

// Keys of dropped streams, so that a late chunk does not begin a dropped stream anew.
class Dropped {
 public:
  std::size_t bytes() const { return keys_.capacity() * sizeof(Key); }

  bool holds(const Key& key) const { return std::binary_search(keys_.begin(), keys_.end(), key); }

  // Add the keys `fresh`, and keep at most `most` keys in total. Costs O(number of keys).
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
