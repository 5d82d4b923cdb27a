// The tokens of all streams of one request, and an index of their occurrences.
//
// A stream is a chain of nodes, one per token; several chains may grow alternately. A chain consists
// of units of 8 nodes. Each unit knows the unit before and after it, so nodes store no links to
// their neighbours. A chain starts with one unit, so a short chain wastes little. Then it grows by
// two units at a time, so that new tokens of a long chain fill a cache line.
// Node 0 means no node. Within a chain, later tokens have higher node numbers.
//
// The index finds all occurrences of a pair (token, next token), newest first. A hash table gives
// the newest occurrence, and each occurrence links to the one before it. Appending a token and
// finding an occurrence are both O(1). Single tokens are indexed in the same way.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace qspec {

using Token = std::int32_t;
using NodeId = std::int32_t;

constexpr NodeId kNoNode = 0;

// Reserve room for `count` more items; growth by a quarter keeps the unused capacity small.
template <typename Item>
void make_room(std::vector<Item>& items, std::size_t count) {
  if (items.size() + count > items.capacity()) {
    items.reserve(items.size() + items.size() / 4 + count);
  }
}

// Append-only storage of nodes; to drop nodes, the caller copies the others to a new arena.
class Arena {
 public:
  Arena() { add_units(1, 0, 0); }  // unit 0 has node 0, and nothing else

  Token token(NodeId node) const { return token_[at(node)]; }
  std::int32_t stream(NodeId node) const { return units_[unit_of(node)].stream; }

  // The previous node in the same index with the same pair, or with the same token.
  NodeId older_pair(NodeId node) const { return older_pair_[at(node)]; }
  NodeId older_single(NodeId node) const { return older_single_[at(node)]; }
  void link(NodeId node, NodeId older_pair, NodeId older_single) {
    older_pair_[at(node)] = older_pair;
    older_single_[at(node)] = older_single;
  }

  // The drafter's second choice beside the token of a node; negative for none.
  Token second(NodeId node) const { return at(node) < second_.size() ? second_[at(node)] : kFree; }
  void set_second(NodeId node, Token token) {
    if (at(node) >= second_.size()) {
      make_room(second_, at(node) + 1 - second_.size());
      second_.resize(at(node) + 1, kFree);
    }
    second_[at(node)] = token;
  }

  NodeId next(NodeId node) const {
    const NodeId after =
        (node + 1) % kUnit != 0 ? node + 1 : units_[unit_of(node)].next * kUnit;
    return token_[at(after)] == kFree ? kNoNode : after;
  }
  NodeId prev(NodeId node) const {
    if (node % kUnit != 0) return node - 1;
    const std::int32_t before = units_[unit_of(node)].prev;
    return before ? before * kUnit + kUnit - 1 : kNoNode;
  }

  int size() const { return size_; }
  // Upper bound (exclusive) of the node numbers.
  std::size_t end() const { return token_.size(); }
  std::size_t bytes() const {
    return token_.capacity() * sizeof(Token) + older_pair_.capacity() * sizeof(NodeId) +
           older_single_.capacity() * sizeof(NodeId) + units_.capacity() * sizeof(Unit) +
           second_.capacity() * sizeof(Token);
  }

  // Append a token >= 0 to the chain that ends in `last`, or start a chain with it.
  NodeId add(Token token, NodeId last, std::int32_t stream) {
    NodeId node = last + 1;
    if (!last || node % kUnit == 0) {
      const auto before = static_cast<std::size_t>(last / kUnit);
      std::int32_t unit = last ? units_[before].next : 0;
      if (!unit) {
        const int count = last ? 2 : 1;
        unit = add_units(count, stream, static_cast<std::int32_t>(before));
      }
      node = unit * kUnit;
    }
    token_[at(node)] = token;
    ++size_;
    return node;
  }

  // Number of equal tokens, at most `cap`, going back from two nodes.
  int match_length(NodeId node, NodeId other, int cap) const {
    int length = 0;
    while (length < cap && node && other && token(node) == token(other)) {
      ++length;
      node = prev(node);
      other = prev(other);
    }
    return length;
  }

  bool same_pair(NodeId node, NodeId other) const {
    return token(node) == token(other) && token(prev(node)) == token(prev(other));
  }

  void check_integrity() const {
    int nodes = 0;
    for (NodeId node = kUnit; at(node) < end(); ++node) {
      if (token(node) == kFree) continue;
      ++nodes;
      const NodeId after = next(node), before = prev(node);
      if ((after && prev(after) != node) || (before && next(before) != node)) {
        throw std::runtime_error("node " + std::to_string(node) + " is linked one way only");
      }
      if (before && stream(before) != stream(node)) {
        throw std::runtime_error("node " + std::to_string(node) + " belongs to another stream than the node before it");
      }
      if (older_pair(node) && !same_pair(older_pair(node), node)) {
        throw std::runtime_error("node " + std::to_string(node) + " has a wrong older pair");
      }
      if (older_single(node) && token(older_single(node)) != token(node)) {
        throw std::runtime_error("node " + std::to_string(node) + " has a wrong older token");
      }
    }
    if (nodes != size_) throw std::runtime_error("an arena has a wrong count of its nodes");
  }

 private:
  static constexpr NodeId kUnit = 8;
  static constexpr Token kFree = -1;

  struct Unit {
    std::int32_t stream, prev, next;  // number of the stream, and of the units around; 0 for none
  };

  static std::size_t at(NodeId node) { return static_cast<std::size_t>(node); }
  static std::size_t unit_of(NodeId node) { return static_cast<std::size_t>(node / kUnit); }

  // Append `count` linked units to unit `prev`, or begin a chain if `prev` is 0. Returns the first.
  std::int32_t add_units(int count, std::int32_t stream, std::int32_t prev) {
    const auto nodes = static_cast<std::size_t>(count * kUnit);
    for (auto* items : {&token_, &older_pair_, &older_single_}) {
      make_room(*items, nodes);
      items->resize(items->size() + nodes, items == &token_ ? kFree : kNoNode);
    }
    make_room(units_, static_cast<std::size_t>(count));
    const auto first = static_cast<std::int32_t>(units_.size());
    if (prev) units_[static_cast<std::size_t>(prev)].next = first;
    for (std::int32_t unit = first; unit < first + count; ++unit) {
      units_.push_back({stream, prev, unit + 1 < first + count ? unit + 1 : 0});
      prev = unit;
    }
    return first;
  }

  std::vector<Token> token_;
  std::vector<NodeId> older_pair_, older_single_;
  std::vector<Token> second_;  // ends with the last node that has a second choice
  std::vector<Unit> units_;
  int size_ = 0;
};

// A hash table from keys to the newest node of each key; `Keys` reads a node's key from the arena.
// A slot also holds the hash, so that a search rarely reads another key's node.
template <typename Keys>
class Table {
 public:
  std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

  NodeId newest(const Arena& arena, std::uint64_t key) const {
    return slots_.empty() ? kNoNode : slots_[find(arena, key)].node;
  }

  // Make `node` the newest node of its key. Returns the previous one, or kNoNode.
  NodeId replace(const Arena& arena, NodeId node) {
    if (4 * (used_ + 1) > 3 * slots_.size()) grow();
    const std::uint64_t key = Keys::of(arena, node);
    Slot& slot = slots_[find(arena, key)];
    const NodeId older = slot.node;
    used_ += older == kNoNode;
    slot = {hash(key), node};
    return older;
  }

  void check_integrity(const Arena& arena) const {
    std::size_t used = 0;
    for (std::size_t at = 0; at < slots_.size(); ++at) {
      if (!slots_[at].node) continue;
      ++used;
      if (find(arena, Keys::of(arena, slots_[at].node)) != at) {
        throw std::runtime_error("an index cannot find a node again");
      }
    }
    if (used != used_) throw std::runtime_error("an index has a wrong count of its slots");
  }

 private:
  struct Slot {
    std::uint32_t hash;
    NodeId node;
  };

  // Fibonacci hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4).
  static std::uint32_t hash(std::uint64_t key) {
    return static_cast<std::uint32_t>(key * 0x9E3779B97F4A7C15u >> 32);
  }

  // The slot of `key`, or the free slot for it. Linear probing ends because the table never fills.
  std::size_t find(const Arena& arena, std::uint64_t key) const {
    const std::size_t last = slots_.size() - 1;
    const std::uint32_t wanted = hash(key);
    std::size_t at = wanted & last;
    while (slots_[at].node &&
           (slots_[at].hash != wanted || Keys::of(arena, slots_[at].node) != key)) {
      at = (at + 1) & last;
    }
    return at;
  }

  void grow() {
    std::vector<Slot> larger(slots_.empty() ? 16 : 2 * slots_.size());
    const std::size_t last = larger.size() - 1;
    for (const Slot& slot : slots_) {
      if (!slot.node) continue;
      std::size_t at = slot.hash & last;
      while (larger[at].node) at = (at + 1) & last;
      larger[at] = slot;
    }
    slots_.swap(larger);
  }

  std::vector<Slot> slots_;  // the size is a power of two
  std::size_t used_ = 0;
};

struct PairKeys {
  static std::uint64_t of(Token first, Token second) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(first)) << 32 |
           static_cast<std::uint32_t>(second);
  }
  static std::uint64_t of(const Arena& arena, NodeId node) {
    return of(arena.token(arena.prev(node)), arena.token(node));
  }
};

struct SingleKeys {
  static std::uint64_t of(Token token) { return static_cast<std::uint32_t>(token); }
  static std::uint64_t of(const Arena& arena, NodeId node) { return of(arena.token(node)); }
};

// The newest occurrence of every pair and every token in one part of an arena.
class Index {
 public:
  std::size_t bytes() const { return pairs_.bytes() + singles_.bytes(); }

  NodeId newest_pair(const Arena& arena, Token first, Token second) const {
    return pairs_.newest(arena, PairKeys::of(first, second));
  }
  NodeId newest_single(const Arena& arena, Token token) const {
    return singles_.newest(arena, SingleKeys::of(token));
  }

  // Index a node that is not the first of its chain.
  void enter(Arena& arena, NodeId node) {
    arena.link(node, pairs_.replace(arena, node), singles_.replace(arena, node));
  }

  void check_integrity(const Arena& arena) const {
    pairs_.check_integrity(arena);
    singles_.check_integrity(arena);
  }

 private:
  Table<PairKeys> pairs_;
  Table<SingleKeys> singles_;
};

}  // namespace qspec
