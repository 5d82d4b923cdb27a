// Builds the draft tree of the most likely tokens from the matching streams, best first.
//
// Each stream votes for its next token with its odds (`Trust`, `Standing`). The probability of a
// token after its parent is the odds of its streams, divided by 1 + the odds of all streams there;
// the 1 stands for "none of them". A drafter's second choice for a token takes a share of "none of
// them" (`Trust::second`). A node's score is the product of these probabilities on its path.

#pragma once

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "trust.h"

namespace qspec {

// A node at which a stream matches the committed text, and how it matches.
struct Place {
  NodeId node;
  int length;
  Kind kind;
  bool followed;
};

// Output arrays of one tree of a batch; each pointer has at least `width` items.
struct TreeRow {
  Token* token_ids;
  std::int32_t* parents;
  std::uint8_t* sources;
  float* scores;
};

// Write a tree of the root alone. Returns its size, 1. The root's source has no meaning.
inline int root_alone(Token root, const TreeRow& row) {
  row.token_ids[0] = root;
  row.parents[0] = 0;
  row.sources[0] = kOutput;
  row.scores[0] = 1.0f;
  return 1;
}

// Builds trees; owns the scratch memory, so that repeated calls allocate nothing.
class Grower {
 public:
  // Write the tree of at most `width` nodes with scores of at least `floor`. Returns its size.
  // `root` is the last committed token; `places` are different nodes with that token. With `seconds`
  // the tree may have second choices of drafters, as leaves.
  int grow(Token root, const std::vector<Place>& places, const Arena& arena,
           const Trust& trust, const Standing& standing, double floor, int width, bool seconds,
           const TreeRow& row) {
    heap_.clear();
    seconds_ = seconds;
    places_.assign(places.begin(), places.end());
    found_ = 0;
    int size = root_alone(root, row);
    if (width > 1) branch(0, 0, 1.0, 0, places_.size(), arena, trust, standing, floor);
    while (!heap_.empty() && size < width) {
      std::pop_heap(heap_.begin(), heap_.end());
      const Candidate best = heap_.back();
      heap_.pop_back();
      place(row, size, best);
      if (++size < width) {
        branch(size - 1, best.depth, best.score, best.begin, best.end, arena, trust, standing, floor);
      }
    }
    return size;
  }

 private:
  struct Candidate {
    double score;
    int order;   // of discovery; with equal scores the first one wins
    int parent;  // index in the tree
    Token token;
    Source source;
    int depth;
    std::size_t begin, end;  // range in `places_` of the nodes with this token

    bool operator<(const Candidate& other) const {
      return score != other.score ? score < other.score : order > other.order;
    }
  };

  struct Branch {
    Token token;
    double weight;
    double heaviest, heaviest_guess;
    Source source;  // of the heaviest stream
    std::size_t count, end;
  };

  static void place(const TreeRow& row, int node, const Candidate& candidate) {
    row.token_ids[node] = candidate.token;
    row.parents[node] = candidate.parent;
    row.sources[node] = static_cast<std::uint8_t>(candidate.source);
    row.scores[node] = static_cast<float>(candidate.score);
  }

  // Push the candidate children of tree node `parent`, which stands for the places [begin, end).
  void branch(int parent, int depth, double score, std::size_t begin, std::size_t end,
              const Arena& arena, const Trust& trust, const Standing& standing, double floor) {
    branches_.clear();
    forget_map();
    double total = 1.0;
    for (std::size_t at = begin; at < end; ++at) {
      const NodeId child = arena.next(places_[at].node);
      if (!child) continue;
      const Place& from = places_[at];
      double weight =
          standing.odds(from.kind, trust.chance(from.kind, from.followed, from.length));
      Branch& branch = branch_of(arena.token(child));
      const double heaviest = branch.heaviest_guess;
      if (from.kind == kGuessed) {
        // Guesses are often variants of one text, so guesses that agree count only once.
        branch.heaviest_guess = std::max(heaviest, weight);
        weight = branch.heaviest_guess - heaviest;
      }
      total += weight;
      branch.weight += weight;
      ++branch.count;
      if (weight > branch.heaviest) {
        branch.heaviest = weight;
        branch.source = kSourceOf[from.kind];
      }
    }
    // Store the places after each token next to each other.
    std::size_t free = places_.size();
    for (Branch& branch : branches_) {
      branch.end = free;
      free += branch.count;
    }
    places_.resize(free);
    for (std::size_t at = begin; at < end; ++at) {
      const Place from = places_[at];
      const NodeId child = arena.next(from.node);
      if (!child) continue;
      const int longer = std::min(from.length + 1, trust.max_match());
      places_[branch_of(arena.token(child)).end++] = {child, longer, from.kind, from.followed};
    }
    for (const Branch& branch : branches_) {
      const double chance = score * branch.weight / total;
      if (chance < floor) continue;
      heap_.push_back({chance, ++found_, parent, branch.token, branch.source, depth + 1,
                       branch.end - branch.count, branch.end});
      std::push_heap(heap_.begin(), heap_.end());
    }
    if (seconds_) add_seconds(parent, depth, score / total, begin, end, arena, trust, floor);
  }

  // Push second choices after the places [begin, end), unless a stream votes for the same token.
  // `score` is that of the parent, times the probability that no stream is right.
  void add_seconds(int parent, int depth, double score, std::size_t begin, std::size_t end,
                   const Arena& arena, const Trust& trust, double floor) {
    for (std::size_t at = begin; at < end; ++at) {
      const Place& from = places_[at];
      const NodeId child = from.followed ? arena.next(from.node) : kNoNode;
      const Token token = child ? arena.second(child) : -1;
      const double chance = score * trust.second(from.kind);
      if (token < 0 || chance < floor) continue;
      const std::size_t voted = branches_.size();
      branch_of(token);
      if (branches_.size() == voted) continue;
      heap_.push_back({chance, ++found_, parent, token, kSecond, depth + 1, 0, 0});
      std::push_heap(heap_.begin(), heap_.end());
    }
  }

  // Find or add the branch of a token. The first `kSearched` branches are searched linearly, which
  // is usually enough. The map holds the others, so thousands of branches cost linear time in total.
  Branch& branch_of(Token token) {
    const std::size_t searched = std::min(branches_.size(), kSearched);
    for (std::size_t at = 0; at < searched; ++at) {
      if (branches_[at].token == token) return branches_[at];
    }
    for (std::size_t at = kSearched + branch_of_token_.size(); at < branches_.size(); ++at) {
      branch_of_token_[branches_[at].token] = at;
    }
    const auto known = branch_of_token_.find(token);
    if (known != branch_of_token_.end()) return branches_[known->second];
    branches_.push_back({token, 0.0, 0.0, 0.0, kQueue, 0, 0});
    return branches_.back();
  }

  // Clear the map unless it is empty, because clearing an empty map visits all buckets too.
  void forget_map() {
    if (!branch_of_token_.empty()) branch_of_token_.clear();
  }

  static constexpr std::size_t kSearched = 16;

  std::vector<Candidate> heap_;
  std::vector<Place> places_;
  std::vector<Branch> branches_;
  std::unordered_map<Token, std::size_t> branch_of_token_;  // branches from index `kSearched` on
  int found_ = 0;
  bool seconds_ = false;
};

// Pad a tree of `size` nodes to `width` with a chain behind the last node, always a leaf, that
// repeats its token. `DraftTrees` says why.
inline void pad(const TreeRow& row, int size, int width) {
  for (int node = size; node < width; ++node) {
    row.token_ids[node] = row.token_ids[size - 1];
    row.parents[node] = node - 1;
    row.sources[node] = row.sources[size - 1];
    row.scores[node] = 0.0f;
  }
}

}  // namespace qspec
