// Tracks where the end of the committed text occurs in a request's streams.
//
// A cursor marks a node where the last committed token occurs, with the length of the match that
// ends there. The cursors are the occurrences of the last two tokens, within the caps. If there are
// none, they are the newest occurrences of the last token alone. A commit advances the cursors of
// streams with the committed token, drops the others, and adds new occurrences. So its cost does not
// depend on the length of the text or of a match.

#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "arena.h"

namespace qspec {

struct Limits {
  int vocab_size, max_request_tokens, max_lookup_tokens, max_match, max_cursors, max_scan;
};

struct Cursor {
  NodeId node;
  int length;
};

class Matcher {
 public:
  const std::vector<Cursor>& cursors() const { return cursors_; }
  std::size_t bytes() const { return cursors_.capacity() * sizeof(Cursor); }

  // Advance the cursors over committed tokens. `observe` gets each cursor's next node, the length of
  // the match before that node, and whether the node has the committed token.
  template <typename Observe>
  void advance(const Arena& arena, const std::vector<Token>& token_ids, int cap, Observe observe) {
    for (Token token : token_ids) {
      std::size_t kept = 0;
      for (const Cursor& cursor : cursors_) {
        const NodeId child = arena.next(cursor.node);
        if (!child) continue;
        const bool right = arena.token(child) == token;
        observe(child, cursor.length, right);
        if (right) cursors_[kept++] = {child, std::min(cursor.length + 1, cap)};
      }
      cursors_.resize(kept);
    }
  }

  // Add occurrences of the text that ends in node `tail`, which the text's index holds already.
  // Call it once after all tokens of a commit.
  void discover(const Arena& arena, NodeId tail, const Index& drafts, const Limits& limits) {
    const Token token = arena.token(tail);
    if (const NodeId before = arena.prev(tail)) {
      const NodeId newest = drafts.newest_pair(arena, arena.token(before), token);
      for (NodeId node : {newest, arena.older_pair(tail)}) {
        for (int scanned = 0; node && scanned < limits.max_scan; ++scanned) {
          if (!holds(node)) {
            cursors_.push_back({node, arena.match_length(node, tail, limits.max_match)});
          }
          node = arena.older_pair(node);
        }
      }
    }
    if (cursors_.empty()) {
      for (NodeId node : {drafts.newest_single(arena, token), arena.older_single(tail)}) {
        for (int scanned = 0; node && scanned < limits.max_scan; ++scanned) {
          cursors_.push_back({node, 1});
          node = arena.older_single(node);
        }
      }
    }
    const auto cap = static_cast<std::size_t>(limits.max_cursors);
    if (cursors_.size() > cap) {
      std::partial_sort(cursors_.begin(), cursors_.begin() + limits.max_cursors, cursors_.end(),
                        [](const Cursor& a, const Cursor& b) {
                          return a.length != b.length ? a.length > b.length : a.node > b.node;
                        });
      cursors_.resize(cap);
    }
  }

  // Add a cursor at `node`, just appended to a stream, if the last two tokens of the text end there.
  void notice(const Arena& arena, NodeId tail, NodeId node, const Limits& limits) {
    if (arena.token(node) != arena.token(tail) ||
        cursors_.size() >= static_cast<std::size_t>(limits.max_cursors)) {
      return;
    }
    const int length = arena.match_length(node, tail, limits.max_match);
    if (length < 2) return;
    const bool only_singles =
        std::all_of(cursors_.begin(), cursors_.end(), [](const Cursor& c) { return c.length < 2; });
    if (only_singles) cursors_.clear();
    cursors_.push_back({node, length});
  }

  // Move the cursors to a new arena, where node n is moved[n]; kNoNode means that it was dropped.
  void move(const Arena& arena, NodeId tail, const std::vector<NodeId>& moved, int cap) {
    std::size_t kept = 0;
    for (const Cursor& cursor : cursors_) {
      const NodeId node = moved[cursor.node];
      if (!node) continue;
      const int left = arena.match_length(node, tail, cap);
      if (left >= std::min(2, cursor.length)) cursors_[kept++] = {node, left};
    }
    cursors_.resize(kept);
  }

  void check_integrity(const Arena& arena, NodeId tail, const Limits& limits) const {
    if (cursors_.size() > static_cast<std::size_t>(limits.max_cursors)) {
      throw std::runtime_error(std::to_string(cursors_.size()) + " cursors are over the cap");
    }
    for (const Cursor& cursor : cursors_) {
      if (cursor.node == tail || cursor.length < 1 || cursor.length > limits.max_match ||
          arena.match_length(cursor.node, tail, cursor.length) != cursor.length) {
        throw std::runtime_error("the cursor at node " + std::to_string(cursor.node) +
                                 " is not at an occurrence of the committed text");
      }
    }
  }

 private:
  bool holds(NodeId node) const {
    return std::any_of(cursors_.begin(), cursors_.end(),
                       [node](const Cursor& cursor) { return cursor.node == node; });
  }

  std::vector<Cursor> cursors_;
};

}  // namespace qspec
