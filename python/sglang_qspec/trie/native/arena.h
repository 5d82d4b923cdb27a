// The tokens of all streams of one request, and the index that finds them again.
//
// A stream is a chain of nodes, one per token, and several chains may grow in turn. Nodes are
// numbered from 1 in the order in which they came; 0 stands for no node. Every pair (token, next
// token) leads to its occurrences, newest first: a hash table leads to the newest one, and a link
// from each to the one before. Appending a token and finding an occurrence are both O(1). Single
// tokens are indexed in the same way.
//
// A node takes 24 bytes. A table stores numbers of nodes alone, since the key can be read from the
// node, so that it takes 4 bytes a slot.

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

struct Node {
  Token token = 0;
  NodeId next = kNoNode;
  NodeId prev = kNoNode;
  std::int32_t stream = 0;
  NodeId older_pair = kNoNode;    // same pair, same index, before this one
  NodeId older_single = kNoNode;  // same token, same index, before this one
};

// Nodes only ever come; to drop some, what stays is copied to a new arena.
class Arena {
 public:
  Arena() : nodes_(1) {}

  const Node& operator[](NodeId node) const { return nodes_[node]; }
  Node& operator[](NodeId node) { return nodes_[node]; }

  NodeId size() const { return static_cast<NodeId>(nodes_.size()) - 1; }
  std::size_t bytes() const { return nodes_.capacity() * sizeof(Node); }

  // Append a node behind `prev`, or start a chain with it.
  NodeId add(Token token, NodeId prev, std::int32_t stream) {
    if (nodes_.size() == nodes_.capacity()) nodes_.reserve(nodes_.size() * 5 / 4 + 16);
    const NodeId node = static_cast<NodeId>(nodes_.size());
    nodes_.push_back({token, kNoNode, prev, stream, kNoNode, kNoNode});
    if (prev) nodes_[prev].next = node;
    return node;
  }

  // How many tokens, up to `cap`, are equal going back from two nodes.
  int match_length(NodeId node, NodeId other, int cap) const {
    int length = 0;
    while (length < cap && node && other && nodes_[node].token == nodes_[other].token) {
      ++length;
      node = nodes_[node].prev;
      other = nodes_[other].prev;
    }
    return length;
  }

  void check_integrity() const {
    for (NodeId node = 1; node <= size(); ++node) {
      const Node& own = nodes_[node];
      if ((own.next && nodes_[own.next].prev != node) ||
          (own.prev && nodes_[own.prev].next != node)) {
        throw std::runtime_error("node " + std::to_string(node) + " is linked one way only");
      }
      if (own.older_pair && (own.older_pair >= node || !same_pair(own.older_pair, node))) {
        throw std::runtime_error("node " + std::to_string(node) + " has a wrong older pair");
      }
      if (own.older_single &&
          (own.older_single >= node || nodes_[own.older_single].token != own.token)) {
        throw std::runtime_error("node " + std::to_string(node) + " has a wrong older token");
      }
    }
  }

  bool same_pair(NodeId node, NodeId other) const {
    return nodes_[node].token == nodes_[other].token &&
           nodes_[nodes_[node].prev].token == nodes_[nodes_[other].prev].token;
  }

 private:
  std::vector<Node> nodes_;
};

// A hash table of nodes by a key that `Keys` reads from the arena: the newest node of each key.
template <typename Keys>
class Table {
 public:
  std::size_t bytes() const { return slots_.capacity() * sizeof(NodeId); }

  NodeId newest(const Arena& arena, std::uint64_t key) const {
    return slots_.empty() ? kNoNode : slots_[slot(slots_, arena, key)];
  }

  // Make `node` the newest of its key; the one that was it before.
  NodeId replace(const Arena& arena, NodeId node) {
    if (4 * (used_ + 1) > 3 * slots_.size()) grow(arena);
    NodeId& held = slots_[slot(slots_, arena, Keys::of(arena, node))];
    const NodeId older = held;
    used_ += older == kNoNode;
    held = node;
    return older;
  }

  void check_integrity(const Arena& arena) const {
    std::size_t used = 0;
    for (std::size_t at = 0; at < slots_.size(); ++at) {
      const NodeId node = slots_[at];
      if (!node) continue;
      ++used;
      if (node > arena.size() || slot(slots_, arena, Keys::of(arena, node)) != at) {
        throw std::runtime_error("an index cannot find node " + std::to_string(node) + " again");
      }
    }
    if (used != used_) throw std::runtime_error("an index has lost count of its slots");
  }

 private:
  // Where `key` is, or the free slot where it would be: linear probing, as the table never fills.
  static std::size_t slot(const std::vector<NodeId>& slots, const Arena& arena,
                          std::uint64_t key) {
    const std::size_t last = slots.size() - 1;
    std::uint64_t hash = key * 0x9E3779B97F4A7C15u;  // Fibonacci hashing, Knuth vol. 3, 6.4
    std::size_t at = (hash ^ hash >> 32) & last;
    while (slots[at] && Keys::of(arena, slots[at]) != key) at = (at + 1) & last;
    return at;
  }

  void grow(const Arena& arena) {
    std::vector<NodeId> larger(slots_.empty() ? 16 : 2 * slots_.size());
    for (NodeId node : slots_) {
      if (node) larger[slot(larger, arena, Keys::of(arena, node))] = node;
    }
    slots_.swap(larger);
  }

  std::vector<NodeId> slots_;  // a power of two of them
  std::size_t used_ = 0;
};

struct PairKeys {
  static std::uint64_t of(Token first, Token second) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(first)) << 32 |
           static_cast<std::uint32_t>(second);
  }
  static std::uint64_t of(const Arena& arena, NodeId node) {
    return of(arena[arena[node].prev].token, arena[node].token);
  }
};

struct SingleKeys {
  static std::uint64_t of(Token token) { return static_cast<std::uint32_t>(token); }
  static std::uint64_t of(const Arena& arena, NodeId node) { return of(arena[node].token); }
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

  // Enter a node that is not the first of its chain.
  void enter(Arena& arena, NodeId node) {
    arena[node].older_pair = pairs_.replace(arena, node);
    arena[node].older_single = singles_.replace(arena, node);
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
