// The drafts and the own text of one request, matched against its committed tokens. The Python class
// `RequestTrie` documents the methods.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena.h"
#include "growth.h"
#include "insertion.h"
#include "matcher.h"
#include "streams.h"
#include "trust.h"

namespace qspec {

class RequestTrie {
 public:
  // `usable_prompt` is the part of the prompt that may be searched; `last_prompt_id` is the last
  // token of the whole prompt. `sources` has a bit for each source that may be proposed, in trees of
  // at most `max_width` nodes.
  RequestTrie(const std::vector<Token>& usable_prompt, Token last_prompt_id, const Limits& limits,
              std::shared_ptr<Trust> trust, unsigned sources, int max_width)
      : limits_(limits),
        trust_(std::move(trust)),
        standing_(trust_->learns()),
        sources_(sources),
        max_width_(max_width),
        last_prompt_id_(last_prompt_id) {
    begin(usable_prompt, {});
    matcher_.discover(arena_, tail_, drafts_, limits_);
  }

  int vocab_size() const { return limits_.vocab_size; }
  std::size_t output_len() const { return output_.size(); }
  Token last_token() const { return output_.empty() ? last_prompt_id_ : output_.back(); }
  // The size that the caps count: tokens, and `kStreamTokens` extra for each stream.
  int size() const { return text_size_ + draft_size(); }
  int draft_size() const {
    return arena_.size() - text_size_ + (kStreamTokens - 1) * streams_.size();
  }

  // Allocated memory in bytes, unused capacity included.
  std::size_t bytes() const {
    return sizeof *this + arena_.bytes() + drafts_.bytes() + text_.bytes() + matcher_.bytes() +
           output_.capacity() * sizeof(Token) + streams_.bytes() + dropped_.bytes() +
           followed_.capacity() * sizeof(std::int32_t) + places_.capacity() * sizeof(Place);
  }

  // Ids outside the vocabulary, negative ones included, give kBadToken. `second_ids` are as many as
  // `token_ids`, or none.
  Insertion insert(Source source, std::int64_t stream_id, std::int64_t base_len,
                   std::int64_t start, const std::vector<Token>& token_ids,
                   const std::vector<Token>& second_ids, bool greedy) {
    if (base_len < 0 || start < 0) return kNegative;
    if (base_len > static_cast<std::int64_t>(output_.size())) return kAhead;
    const Key key{stream_id, static_cast<std::int32_t>(base_len), source};
    if (dropped_.holds(key)) return kEvicted;
    std::int32_t number = streams_.find(key);
    const std::int64_t known = number ? streams_[number].length : 0;
    if (start > known) return kGap;
    const auto overlap = static_cast<std::size_t>(known - start);
    if (overlap >= token_ids.size()) return kKnown;
    const std::vector<Token> fresh(token_ids.begin() + (known - start), token_ids.end());
    std::vector<Token> seconds;
    if (!second_ids.empty()) seconds.assign(second_ids.begin() + (known - start), second_ids.end());
    const auto is_foreign = [this](Token token) { return !in_vocabulary(token); };
    if (std::any_of(fresh.begin(), fresh.end(), is_foreign) ||
        std::any_of(seconds.begin(), seconds.end(), is_foreign)) {
      return kBadToken;
    }
    if (number && !streams_[number].ends_with(arena_, token_ids, overlap)) return kConflict;
    const std::size_t count = fresh.size() + (number ? 0 : kStreamTokens);
    if (!fits(count)) {
      if (!make_room(count, number)) return kFull;
      number = streams_.find(key);
    }
    append(number ? number : open(key, greedy), fresh, seconds);
    return kAdded;
  }

  void commit(const std::vector<Token>& token_ids) {
    if (token_ids.empty()) return;
    output_.insert(output_.end(), token_ids.begin(), token_ids.end());
    extend_text(token_ids, true);
    text_size_ += static_cast<int>(token_ids.size());
    keep_followed([this](Stream& stream) { return follow(stream); });
    matcher_.advance(arena_, token_ids, limits_.max_match,
                     [this](NodeId child, int length, bool right) {
                       observe(kind_of(child), false, length, right);
                     });
    matcher_.discover(arena_, tail_, drafts_, limits_);
    if (text_size_ > limits_.max_lookup_tokens) {
      rebuild(limits_.max_lookup_tokens / 2, all_streams(true));
    }
  }

  // Write the tree of at most `width` nodes behind the last committed token `root`. Returns its size.
  // Only sources that are in both `sources` and `sources_` are proposed.
  int propose(Grower& grower, Token root, double floor, int width, unsigned sources, const TreeRow& row) {
    find_places(sources);
    const int most = std::min(width, max_width_);
    const bool seconds = sources & sources_ & 1u << kSecond;
    return grower.grow(root, places_, arena_, *trust_, standing_, floor, most, seconds, row);
  }

  // Length of the longest match that proposes a token with these `sources`; 0 for none.
  int longest_match(unsigned sources) {
    find_places(sources);
    int longest = 0;
    for (const Place& place : places_) {
      if (arena_.next(place.node)) longest = std::max(longest, place.length);
    }
    return longest;
  }

  // Drop all drafts, and all own text except the last `max_match` tokens.
  void evict() {
    rebuild(limits_.max_match, all_streams(false));
  }

  void check_integrity() const {
    arena_.check_integrity();
    drafts_.check_integrity(arena_);
    text_.check_integrity(arena_);
    matcher_.check_integrity(arena_, tail_, limits_);
    streams_.check_integrity(arena_);
    int draft_tokens = 0;
    std::int32_t followed = 0;
    for (std::int32_t number = 1; number <= streams_.size(); ++number) {
      draft_tokens += streams_[number].length + kStreamTokens;
      followed += streams_[number].followed;
    }
    if (draft_tokens != draft_size()) fail("the size of the drafts is not the sum of the streams' sizes");
    if (draft_tokens > limits_.max_request_tokens) fail("the drafts are over the cap");
    if (text_size_ > limits_.max_lookup_tokens) fail("the own text is over the cap");
    const bool are_followed =
        std::all_of(followed_.begin(), followed_.end(),
                    [this](std::int32_t number) { return streams_[number].followed; });
    if (!are_followed || followed != static_cast<std::int32_t>(followed_.size())) {
      fail("the list of followed streams is wrong");
    }
  }

 private:
  // Stream number of the own text, a chain of nodes: prompt, then output from `first_output_` on.
  static constexpr std::int32_t kText = 0;
  static constexpr NodeId kNowhere = std::numeric_limits<NodeId>::max();

  [[noreturn]] static void fail(const char* what) { throw std::runtime_error(what); }

  static bool holds(unsigned sources, Kind kind) { return sources >> kSourceOf[kind] & 1u; }

  // Set `places_` to the matches of the committed text in sources that may be proposed.
  void find_places(unsigned sources) {
    sources &= sources_;
    places_.clear();
    for (const std::int32_t number : followed_) {
      const Stream& stream = streams_[number];
      // A stream that ends behind the output has no next token.
      if (arena_.next(stream.at) && holds(sources, stream.kind)) {
        const int length = std::min(stream.matched + 1, limits_.max_match);
        places_.push_back({stream.at, length, stream.kind, true});
      }
    }
    const std::size_t followed = places_.size();
    for (const Cursor& cursor : matcher_.cursors()) {
      const Kind kind = kind_of(cursor.node);
      const bool is_followed =
          std::any_of(places_.begin(), places_.begin() + followed,
                      [&cursor](const Place& place) { return place.node == cursor.node; });
      if (!is_followed && holds(sources, kind)) {
        places_.push_back({cursor.node, cursor.length, kind, false});
      }
    }
  }

  bool in_vocabulary(Token token) const { return token >= 0 && token < limits_.vocab_size; }

  Kind kind_of(NodeId node) const {
    const std::int32_t number = arena_.stream(node);
    if (number != kText) return streams_[number].kind;
    return node >= first_output_ ? kOfOutput : kOfPrompt;
  }

  std::int32_t open(const Key& key, bool greedy) {
    Token context =
        key.base_len ? output_[static_cast<std::size_t>(key.base_len) - 1] : last_prompt_id_;
    if (!in_vocabulary(context)) context = 0;  // compared, never proposed
    const Kind kind = draft_kind(key.source, greedy);
    const NodeId first = arena_.add(context, kNoNode, streams_.size() + 1);
    const std::int32_t number = streams_.add({key, first, first, 0, first, 0, kind, true});
    followed_.push_back(number);
    return number;
  }

  void append(std::int32_t number, const std::vector<Token>& token_ids,
              const std::vector<Token>& second_ids) {
    Stream& stream = streams_[number];
    const Token tail = arena_.token(tail_);
    const NodeId known = stream.last;
    for (std::size_t at = 0; at < token_ids.size(); ++at) {
      stream.last = arena_.add(token_ids[at], stream.last, number);
      if (!second_ids.empty()) arena_.set_second(stream.last, second_ids[at]);
      drafts_.enter(arena_, stream.last);
    }
    stream.length += static_cast<int>(token_ids.size());
    if (stream.followed && !follow(stream)) {
      stream.followed = false;
      followed_.erase(std::find(followed_.begin(), followed_.end(), number));
    }
    for (NodeId node = arena_.next(known); node; node = arena_.next(node)) {
      if (arena_.token(node) == tail) matcher_.notice(arena_, tail_, node, limits_);
    }
  }

  // Record whether the next token of a stream that matched like this was the target's.
  void observe(Kind kind, bool followed, int length, bool right) {
    standing_.observe(kind, trust_->chance(kind, followed, length), right);
    trust_->observe(kind, followed, length, right);
  }

  // Compare the stream with the output so far. Returns false at the first different token.
  bool follow(Stream& stream) {
    auto place = static_cast<std::size_t>(stream.key.base_len + stream.matched);
    for (; place < output_.size(); ++place) {
      const NodeId node = arena_.next(stream.at);
      if (!node) break;
      const bool right = arena_.token(node) == output_[place];
      observe(stream.kind, true, std::min(stream.matched + 1, limits_.max_match), right);
      if (!right) {
        const Token second = arena_.second(node);
        if (second >= 0) trust_->observe_second(stream.kind, second == output_[place]);
        return false;
      }
      stream.at = node;
      ++stream.matched;
    }
    return true;
  }

  template <typename Stays>
  void keep_followed(Stays stays) {
    std::size_t kept = 0;
    for (const std::int32_t number : followed_) {
      Stream& stream = streams_[number];
      stream.followed = stays(stream);
      if (stream.followed) followed_[kept++] = number;
    }
    followed_.resize(kept);
  }

  std::size_t cap() const { return static_cast<std::size_t>(limits_.max_request_tokens); }

  bool fits(std::size_t count) const {
    return static_cast<std::size_t>(draft_size()) + count <= cap();
  }

  // One flag per stream number, all equal to `stay`; index 0 is no stream.
  std::vector<char> all_streams(bool stay) const {
    return std::vector<char>(static_cast<std::size_t>(streams_.size()) + 1, stay);
  }

  // Make room for `count` draft tokens by dropping streams. Streams that are not followed go first,
  // then followed streams that the output has outrun: an outrun stream helps only if it grows
  // faster than the output. Returns false if this does not suffice. Stream `spared` stays.
  bool make_room(std::size_t count, std::int32_t spared) {
    std::vector<char> found = all_streams(false);
    for (const Cursor& cursor : matcher_.cursors()) {
      found[static_cast<std::size_t>(arena_.stream(cursor.node))] = 1;
    }
    using Victim = std::tuple<int, bool, std::int32_t>;  // the least valuable first
    std::vector<Victim> victims;
    for (std::int32_t number = 1; number <= streams_.size(); ++number) {
      const Stream& stream = streams_[number];
      const bool is_outrun = stream.followed && stream.is_outrun(arena_, output_.size());
      if (number == spared || (stream.followed && !is_outrun)) continue;
      const int worth = is_outrun ? 2 : found[static_cast<std::size_t>(number)];
      victims.emplace_back(worth, stream.kind == kGuessed, number);
    }
    std::sort(victims.begin(), victims.end());
    std::size_t size = static_cast<std::size_t>(draft_size());
    std::vector<char> stays = all_streams(true);
    for (const Victim& victim : victims) {
      // Free a quarter of the cap extra, so that rebuilding costs O(1) per inserted token.
      if (size + count <= cap() - cap() / 4) break;
      const std::int32_t number = std::get<2>(victim);
      size -= static_cast<std::size_t>(streams_[number].length + kStreamTokens);
      stays[static_cast<std::size_t>(number)] = false;
    }
    if (size + count > cap()) return false;
    rebuild(text_size_, stays);
    return true;
  }

  // Start an arena with the own text. Without any, token 0 stands for the context.
  void begin(const std::vector<Token>& prompt_ids, const std::vector<Token>& output_ids) {
    arena_ = Arena();
    drafts_ = Index();
    text_ = Index();
    tail_ = kNoNode;
    first_output_ = kNowhere;
    extend_text(prompt_ids, false);
    if (prompt_ids.empty() && output_ids.empty()) extend_text({0}, false);
    extend_text(output_ids, true);
    text_size_ = arena_.size();
  }

  // Append to the own text. The first token of a text ends no pair, so it is not indexed.
  void extend_text(const std::vector<Token>& token_ids, bool is_output) {
    for (Token token : token_ids) {
      const bool is_first = tail_ == kNoNode;
      tail_ = arena_.add(token, tail_, kText);
      if (is_output && first_output_ == kNowhere) first_output_ = tail_;
      if (!is_first) text_.enter(arena_, tail_);
    }
  }

  // Copy the last `text_size` tokens of the own text and the streams that stay to a new arena. This
  // is the only way to free tokens. It costs O(size), so callers free a share of the whole at once.
  void rebuild(int text_size, const std::vector<char>& stays) {
    const Arena old = std::move(arena_);
    std::vector<NodeId> own;
    for (NodeId node = tail_; node && static_cast<int>(own.size()) < std::max(text_size, 1);
         node = old.prev(node)) {
      own.push_back(node);
    }
    std::reverse(own.begin(), own.end());
    const NodeId first_output = first_output_;
    std::vector<Token> prompt_ids, output_ids;
    for (NodeId node : own) {
      (node < first_output ? prompt_ids : output_ids).push_back(old.token(node));
    }
    begin(prompt_ids, output_ids);
    std::vector<NodeId> moved(old.end(), kNoNode);
    NodeId copied = tail_;
    for (auto node = own.rbegin(); node != own.rend(); ++node) {
      moved[static_cast<std::size_t>(*node)] = copied;
      copied = arena_.prev(copied);
    }
    copy_streams(old, stays, moved);
    matcher_.move(arena_, tail_, moved, limits_.max_match);
  }

  // Copy the streams that stay, in their order, and remember the keys of the dropped ones. The number
  // of keys is limited, whatever a sidecar sends. A late chunk of a stream without a remembered key
  // is refused as a gap, or begins the stream anew.
  void copy_streams(const Arena& old, const std::vector<char>& stays, std::vector<NodeId>& moved) {
    const Streams all = std::exchange(streams_, Streams());
    std::vector<std::int32_t> renumbered(stays.size());
    std::vector<Key> gone;
    for (std::int32_t number = 1; number <= all.size(); ++number) {
      if (stays[static_cast<std::size_t>(number)]) {
        renumbered[static_cast<std::size_t>(number)] = copy(all[number], old, moved);
      } else {
        gone.push_back(all[number].key);
      }
    }
    const std::vector<std::int32_t> followed = std::exchange(followed_, {});
    for (const std::int32_t number : followed) {
      const std::int32_t now = renumbered[static_cast<std::size_t>(number)];
      if (now) followed_.push_back(now);
    }
    if (!gone.empty()) dropped_.add(std::move(gone), cap() / (kStreamTokens + 1));
  }

  std::int32_t copy(Stream stream, const Arena& old, std::vector<NodeId>& moved) {
    const std::int32_t number = streams_.size() + 1;
    NodeId last = kNoNode;
    for (NodeId node = stream.first; node; node = old.next(node)) {
      const bool is_first = node == stream.first;
      last = moved[static_cast<std::size_t>(node)] = arena_.add(old.token(node), last, number);
      if (old.second(node) >= 0) arena_.set_second(last, old.second(node));
      if (!is_first) drafts_.enter(arena_, last);
    }
    stream.first = moved[static_cast<std::size_t>(stream.first)];
    stream.last = last;
    stream.at = moved[static_cast<std::size_t>(stream.at)];
    return streams_.add(stream);
  }

  Limits limits_;
  std::shared_ptr<Trust> trust_;
  Standing standing_;
  unsigned sources_;
  int max_width_;
  Token last_prompt_id_;
  std::vector<Token> output_;  // committed so far
  Arena arena_;
  Index drafts_, text_;
  NodeId tail_ = kNoNode;  // node of the last committed token
  NodeId first_output_ = kNowhere;
  int text_size_ = 0;  // tokens of own text in the arena
  Streams streams_;
  std::vector<std::int32_t> followed_;  // numbers of the followed streams, in the order of opening
  Dropped dropped_;
  Matcher matcher_;
  std::vector<Place> places_;
};

}  // namespace qspec
