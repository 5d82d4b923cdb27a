// The drafts and the own text of one request: inserted as they come, matched against what is
// committed. `RequestTrie` in Python says what the methods promise.

#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "arena.h"
#include "growth.h"
#include "insertion.h"
#include "matcher.h"
#include "trust.h"

namespace qspec {

class RequestTrie {
 public:
  // `usable_prompt` is the part of the prompt that may be searched; `last_prompt_id` its real end.
  // `sources` is a bit for each source that may be proposed, in trees of at most `max_width` nodes.
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

  std::size_t output_len() const { return output_.size(); }
  Token last_token() const { return output_.empty() ? last_prompt_id_ : output_.back(); }
  int size() const { return arena_.size(); }
  int draft_size() const { return arena_.size() - text_size_; }

  // Bytes that the tokens take, allocated ones that are free included.
  std::size_t bytes() const {
    return sizeof *this + arena_.bytes() + drafts_.bytes() + text_.bytes() + matcher_.bytes() +
           output_.capacity() * sizeof(Token) + kinds_.capacity() * sizeof(Kind) +
           streams_.size() * (sizeof(Stream) + sizeof(Key) + 4 * sizeof(void*)) +
           evicted_.size() * (sizeof(Key) + 4 * sizeof(void*)) +
           followed_.capacity() * sizeof(Stream*);
  }

  // `token_ids` that do not fit a Token are given as negative ones.
  Insertion insert(Source source, std::int64_t stream_id, std::int64_t base_len,
                   std::int64_t start, const std::vector<Token>& token_ids, bool greedy) {
    if (base_len < 0 || start < 0) return kNegative;
    const Key key{source, stream_id, base_len};
    if (evicted_.count(key)) return kEvicted;
    if (base_len > static_cast<std::int64_t>(output_.size())) return kAhead;
    const auto held = streams_.find(key);
    Stream* stream = held == streams_.end() ? nullptr : &held->second;
    const std::int64_t known = stream ? stream->length : 0;
    if (start > known) return kGap;
    const auto overlap = static_cast<std::size_t>(known - start);
    if (overlap >= token_ids.size()) return kKnown;
    const std::vector<Token> fresh(token_ids.begin() + overlap, token_ids.end());
    for (Token token : fresh) {
      if (token < 0 || token >= limits_.vocab_size) return kBadToken;
    }
    if (stream && !ends_with(*stream, token_ids, overlap)) return kConflict;
    if (!make_room(fresh.size() + !stream, stream)) return kFull;
    if (!stream) stream = &open(key, greedy);
    append(*stream, fresh);
    return kAdded;
  }

  void commit(const std::vector<Token>& token_ids) {
    if (token_ids.empty()) return;
    output_.insert(output_.end(), token_ids.begin(), token_ids.end());
    extend_text(token_ids, true);
    text_size_ += static_cast<int>(token_ids.size());
    keep_followed([this](Stream* stream) { return follow(*stream); });
    matcher_.advance(arena_, token_ids, limits_.max_match,
                     [this](NodeId child, int length, bool right) {
                       observe(kind_of(child), false, length, right);
                     });
    matcher_.discover(arena_, tail_, drafts_, limits_);
    if (text_size_ > limits_.max_lookup_tokens) {
      rebuild(limits_.max_lookup_tokens / 2, [](const Key&) { return true; });
    }
  }

  // Write the tree of at most `width` nodes behind the last committed token `root`; its size.
  // Of the sources that may be proposed, those in `sources` are.
  int propose(Grower& grower, Token root, Policy policy, double floor, int width, unsigned sources,
              const TreeRow& row) {
    sources &= sources_;
    places_.clear();
    for (const Stream* stream : followed_) {
      // One that lags behind the output has no next token, so it proposes nothing.
      if (arena_.next(stream->at) && holds(sources, stream->kind)) {
        const int length = std::min(stream->matched + 1, limits_.max_match);
        places_.push_back({stream->at, length, stream->kind, true});
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
    const int most = std::min(width, max_width_);
    return grower.grow(root, places_, arena_, *trust_, standing_, policy, floor, most, row);
  }

  // Drop all drafts, and all own text but what the next matches need.
  void evict() {
    for (const auto& [key, stream] : streams_) evicted_.insert(key);
    forget_evicted();
    rebuild(limits_.max_match, [](const Key&) { return false; });
  }

  void check_integrity() const {
    arena_.check_integrity();
    drafts_.check_integrity(arena_);
    text_.check_integrity(arena_);
    matcher_.check_integrity(arena_, tail_, limits_);
    int draft_tokens = 0;
    for (const auto& [key, stream] : streams_) {
      draft_tokens += stream.length + 1;
      NodeId node = stream.first;
      NodeId last = node;
      for (int place = 0; node; node = arena_.next(node), ++place) {
        if (place == stream.matched && node != stream.at) fail("a stream is at another place");
        if (place > stream.length) fail("a stream is longer than it says");
        last = node;
      }
      if (last != stream.last) fail("a stream ends before its last node");
    }
    if (draft_tokens != draft_size()) fail("the drafts are not the streams' lengths");
    if (draft_tokens > limits_.max_request_tokens) fail("the drafts are over the cap");
    if (text_size_ > limits_.max_lookup_tokens) fail("the own text is over the cap");
    for (const Stream* stream : followed_) {
      const bool kept = std::any_of(streams_.begin(), streams_.end(),
                                    [stream](const auto& own) { return &own.second == stream; });
      if (!kept) fail("a stream is followed that is not kept");
    }
  }

 private:
  // (source, stream_id, base_len): a draft from a later base is a stream of its own.
  using Key = std::tuple<Source, std::int64_t, std::int64_t>;

  // A chain of nodes: the token before the draft, then the draft's tokens.
  struct Stream {
    std::int64_t base_len;
    Kind kind;
    std::int32_t number;
    NodeId first, last;  // `first` is the token before the draft's first one
    int length;
    NodeId at;    // up to which the stream is what was committed
    int matched;  // tokens of the stream that were committed in its place, so far
  };

  // Number of the own text: one chain of nodes, of which output is the part from `first_output_` on.
  static constexpr std::int32_t kText = 0;
  // What `make_room` knows of a stream that is followed.
  static constexpr char kOutrun = 1, kLeads = 2;
  static constexpr NodeId kNowhere = std::numeric_limits<NodeId>::max();

  [[noreturn]] static void fail(const char* what) { throw std::runtime_error(what); }

  static bool holds(unsigned sources, Kind kind) { return sources >> kSourceOf[kind] & 1u; }

  std::size_t number_of(NodeId node) const {
    return static_cast<std::size_t>(arena_.stream(node));
  }

  Kind kind_of(NodeId node) const {
    const std::size_t number = number_of(node);
    if (number != kText) return kinds_[number];
    return node >= first_output_ ? kOfOutput : kOfPrompt;
  }

  Stream& open(const Key& key, bool greedy) {
    const auto [source, stream_id, base_len] = key;
    Token context = base_len ? output_[base_len - 1] : last_prompt_id_;
    if (context < 0 || context >= limits_.vocab_size) context = 0;  // compared, never proposed
    const Kind of_queue = greedy ? kGreedy : kSampled;
    const Kind kind = source == kGuess ? kGuessed : source == kStep ? kStepped : of_queue;
    const auto number = static_cast<std::int32_t>(kinds_.size());
    kinds_.push_back(kind);
    const NodeId first = arena_.add(context, kNoNode, number);
    Stream& stream = streams_[key];
    stream = {base_len, kind, number, first, first, 0, first, 0};
    followed_.push_back(&stream);
    return stream;
  }

  void append(Stream& stream, const std::vector<Token>& token_ids) {
    const Token tail = arena_.token(tail_);
    const NodeId known = stream.last;
    for (Token token : token_ids) {
      stream.last = arena_.add(token, stream.last, stream.number);
      drafts_.enter(arena_, stream.last);
    }
    stream.length += static_cast<int>(token_ids.size());
    keep_followed([this, &stream](Stream* own) { return own != &stream || follow(stream); });
    for (NodeId node = arena_.next(known); node; node = arena_.next(node)) {
      if (arena_.token(node) == tail) matcher_.notice(arena_, tail_, node, limits_);
    }
  }

  // Whether the next token of a stream which matched like this was the target's.
  void observe(Kind kind, bool followed, int length, bool right) {
    standing_.observe(kind, trust_->chance(kind, followed, length), right);
    trust_->observe(kind, followed, length, right);
  }

  // Go along what was committed; false once the stream has something else there.
  bool follow(Stream& stream) {
    auto place = static_cast<std::size_t>(stream.base_len + stream.matched);
    for (; place < output_.size(); ++place) {
      const NodeId node = arena_.next(stream.at);
      if (!node) break;
      const bool right = arena_.token(node) == output_[place];
      observe(stream.kind, true, std::min(stream.matched + 1, limits_.max_match), right);
      if (!right) return false;
      stream.at = node;
      ++stream.matched;
    }
    return true;
  }

  template <typename Stays>
  void keep_followed(Stays stays) {
    std::size_t kept = 0;
    for (Stream* stream : followed_) {
      if (stays(stream)) followed_[kept++] = stream;
    }
    followed_.resize(kept);
  }

  bool ends_with(const Stream& stream, const std::vector<Token>& token_ids,
                 std::size_t count) const {
    NodeId node = stream.last;
    while (count-- > 0) {
      if (arena_.token(node) != token_ids[count]) return false;
      node = arena_.prev(node);
    }
    return true;
  }

  // Whether the output has passed the end of a stream that it followed that far.
  bool outrun(const Stream& stream) const {
    const auto end = static_cast<std::size_t>(stream.base_len + stream.matched);
    return !arena_.next(stream.at) && end < output_.size();
  }

  // Let `count` more draft tokens fit, by dropping streams that are followed no longer, and if need
  // be those that were outrun: they would only be of use if they grew faster than the output.
  bool make_room(std::size_t count, const Stream* spared) {
    const auto cap = static_cast<std::size_t>(limits_.max_request_tokens);
    std::size_t size = static_cast<std::size_t>(draft_size());
    if (size + count <= cap) return true;
    // By stream number: a sidecar can fill the cap with thousands of streams.
    std::vector<char> alive(kinds_.size()), followed(kinds_.size());
    for (const Cursor& cursor : matcher_.cursors()) alive[number_of(cursor.node)] = 1;
    for (const Stream* stream : followed_) {
      followed[static_cast<std::size_t>(stream->number)] = outrun(*stream) ? kOutrun : kLeads;
    }
    using Victim = std::tuple<int, bool, std::int32_t, Key>;  // the least valuable first
    std::vector<Victim> victims;
    for (const auto& [key, stream] : streams_) {
      const auto number = static_cast<std::size_t>(stream.number);
      if (followed[number] == kLeads || &stream == spared) continue;
      const int worth = followed[number] == kOutrun ? 2 : alive[number];
      victims.emplace_back(worth, stream.kind == kGuessed, stream.number, key);
    }
    std::sort(victims.begin(), victims.end());
    std::set<Key> dropped;
    for (const Victim& victim : victims) {
      // A quarter more than needed, so that rebuilding costs O(1) for each inserted token.
      if (size + count <= cap - cap / 4) break;
      const Key& key = std::get<Key>(victim);
      size -= static_cast<std::size_t>(streams_.at(key).length) + 1;
      dropped.insert(key);
    }
    if (size + count > cap) return false;
    evicted_.insert(dropped.begin(), dropped.end());
    forget_evicted();
    rebuild(text_size_, [&dropped](const Key& key) { return !dropped.count(key); });
    return true;
  }

  // Remember no more dropped streams than tokens may be kept, whatever a sidecar sends. A late piece
  // of a forgotten one finds a gap, or begins the stream anew.
  void forget_evicted() {
    const auto cap = static_cast<std::size_t>(limits_.max_request_tokens);
    while (evicted_.size() > cap) evicted_.erase(evicted_.begin());
  }

  // Start an arena with the own text; without any, token 0 stands for the context.
  void begin(const std::vector<Token>& prompt_ids, const std::vector<Token>& output_ids) {
    arena_ = Arena();
    drafts_ = Index();
    text_ = Index();
    kinds_ = {kOfPrompt};  // of kText, where `kind_of` does not look
    tail_ = kNoNode;
    first_output_ = kNowhere;
    extend_text(prompt_ids, false);
    if (prompt_ids.empty() && output_ids.empty()) extend_text({0}, false);
    extend_text(output_ids, true);
    text_size_ = arena_.size();
  }

  // The first token of a text is context only: it ends no pair.
  void extend_text(const std::vector<Token>& token_ids, bool is_output) {
    for (Token token : token_ids) {
      const bool is_first = tail_ == kNoNode;
      tail_ = arena_.add(token, tail_, kText);
      if (is_output && first_output_ == kNowhere) first_output_ = tail_;
      if (!is_first) text_.enter(arena_, tail_);
    }
  }

  // Copy the last `text_size` tokens of the own text and the streams that stay to a new arena.
  // The only way to free tokens. It costs O(what stays), so callers free a share of the whole.
  template <typename Stays>
  void rebuild(int text_size, Stays stays) {
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
      moved[*node] = copied;
      copied = arena_.prev(copied);
    }
    std::vector<Stream*> staying;
    for (auto held = streams_.begin(); held != streams_.end();) {
      if (stays(held->first)) {
        staying.push_back(&held->second);
        ++held;
      } else {
        Stream* gone = &held->second;
        keep_followed([gone](Stream* stream) { return stream != gone; });
        held = streams_.erase(held);
      }
    }
    std::sort(staying.begin(), staying.end(),
              [](const Stream* a, const Stream* b) { return a->number < b->number; });
    for (Stream* stream : staying) copy(*stream, old, moved);
    matcher_.move(arena_, tail_, moved, limits_.max_match);
  }

  void copy(Stream& stream, const Arena& old, std::vector<NodeId>& moved) {
    stream.number = static_cast<std::int32_t>(kinds_.size());
    kinds_.push_back(stream.kind);
    NodeId last = kNoNode;
    for (NodeId node = stream.first; node; node = old.next(node)) {
      const bool is_first = node == stream.first;
      last = moved[node] = arena_.add(old.token(node), last, stream.number);
      if (!is_first) drafts_.enter(arena_, last);
    }
    stream.first = moved[stream.first];
    stream.last = last;
    stream.at = moved[stream.at];
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
  std::vector<Kind> kinds_;  // by stream number
  NodeId tail_ = kNoNode;    // of the last committed token
  NodeId first_output_ = kNowhere;
  int text_size_ = 0;        // tokens of own text in the arena
  std::map<Key, Stream> streams_;
  std::vector<Stream*> followed_;  // those that continue all that is committed, or lag behind it
  std::set<Key> evicted_;
  Matcher matcher_;
  std::vector<Place> places_;
};

}  // namespace qspec
